# shellcheck shell=bash
# Source this. People behind a mirror or a proxy configure pip, and uv does not read pip's settings.

uv_like_pip() { # uv_like_pip PYTHON: set uv's unset variables from that interpreter's pip settings
    local settings index
    settings=$("$1" -m pip config list 2>/dev/null || true)
    pip_setting() { sed -nE "s/^(global|install|:env:)\.$1=.(.*).\$/\2/p" <<<"$settings" | tail -n 1; }
    index=$(pip_setting index-url)
    [ -z "$index" ] || [ -n "${UV_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    [ -z "$(pip_setting proxy)" ] || export ALL_PROXY=${ALL_PROXY:-$(pip_setting proxy)}
    [ -z "$(pip_setting cert)" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$(pip_setting cert)}
    # uv's own list of authorities lacks those of a company. A bare container may have no system list.
    [ ! -s /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120}
}
