# shellcheck shell=bash
# Sourced, not run. People behind a mirror or a proxy configure pip; uv reads none of that.

uv_like_pip() { # uv_like_pip PYTHON: exports uv's variables from that interpreter's pip settings, where uv has none
    local settings index
    settings=$("$1" -m pip config list 2>/dev/null || true)
    pip_setting() { sed -nE "s/^(global|install|:env:)\.$1=.(.*).\$/\2/p" <<<"$settings" | tail -n 1; }
    index=$(pip_setting index-url)
    [ -z "$index" ] || [ -n "${UV_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    [ -z "$(pip_setting proxy)" ] || export ALL_PROXY=${ALL_PROXY:-$(pip_setting proxy)}
    [ -z "$(pip_setting cert)" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$(pip_setting cert)}
    # uv's own list of authorities lacks a company's; a bare container has no list of the system to offer.
    [ ! -s /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120}
}
