# shellcheck shell=bash
# Sourced, not run. People behind a mirror or a proxy configure pip; uv reads none of that. This hands uv what pip
# was told, unless uv has settings of its own.

uv_like_pip() { # uv_like_pip PYTHON: exports uv's variables from that interpreter's pip settings
    local settings
    settings=$("$1" -m pip config list 2>/dev/null || true)

    # An environment variable wins over the section of the command, and that over [global], as in pip.
    pip_setting() {
        local section value
        for section in ':env:' install global; do
            value=$(sed -n "s/^$section\\.$1=.\\(.*\\).\$/\\1/p" <<<"$settings")
            [ -z "$value" ] || { printf '%s' "$value"; return; }
        done
    }

    local value
    value=$(pip_setting index-url)
    [ -z "$value" ] || [ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=$value
    value=$(pip_setting trusted-host)
    [ -z "$value" ] || [ -n "${UV_INSECURE_HOST:-}" ] || export UV_INSECURE_HOST=${value//\\n/ }
    value=$(pip_setting cert)
    [ -z "$value" ] || [ -n "${SSL_CERT_FILE:-}" ] || export SSL_CERT_FILE=$value
    value=$(pip_setting proxy)
    [ -z "$value" ] || [ -n "${HTTPS_PROXY:-}${https_proxy:-}${ALL_PROXY:-}" ] || export ALL_PROXY=$value
    value=$(pip_setting timeout)
    [ -n "$value" ] || value=$(pip_setting default-timeout)
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-${value:-120}}

    # uv's own list of authorities lacks a company's; a bare container has no list of the system to offer.
    [ ! -s /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
}
