# shellcheck shell=bash
# Reads settings of .env outside of docker compose. Sourced, in the checkout's folder.

# of_env NAME: its value in .env, which may be written as compose allows: quotes, export, comments, line ends of Windows.
of_env() {
    [ ! -r .env ] ||
        sed -nE "s/^[[:space:]]*(export[[:space:]]+)?$1[[:space:]]*[=:][[:space:]]*['\"]?([^'\" ]*).*/\2/p" .env | tr -d '\r' | tail -n 1
}

# Exports what .env says of mirrors and proxies, for programs on this machine. The environment wins. In the station the
# environment has them already.
mirrors_from_env() {
    local name value
    [ "${TRAINSTATION_IMAGE:-}" != 1 ] || return 0
    for name in APT_MIRROR PIP_INDEX_URL HF_ENDPOINT HTTP_PROXY HTTPS_PROXY NO_PROXY NVIDIA_TOOLKIT_MIRROR; do
        value=${!name:-$(of_env "$name")}
        [[ $value != *REPLACE_WITH_* ]] ||
            { echo "error: $name=$value in .env is a placeholder: fill in what it asks for, or remove that line" >&2; exit 2; }
        [ -z "$value" ] || export "$name=$value"
    done
    [ -n "${HTTP_PROXY:-}${HTTPS_PROXY:-}" ] || return 0
    # What runs here talks to itself directly. apt and wget know the names in small letters alone.
    NO_PROXY=localhost,127.0.0.1,::1${NO_PROXY:+,$NO_PROXY}
    export NO_PROXY no_proxy=$NO_PROXY ${HTTP_PROXY:+"http_proxy=$HTTP_PROXY"} ${HTTPS_PROXY:+"https_proxy=$HTTPS_PROXY"}
}
