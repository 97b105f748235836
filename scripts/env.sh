# shellcheck shell=bash
# Reads settings of .env without docker compose. Source it in the checkout's folder.

# of_env NAME: print its value in .env. The file may use what compose allows: quotes, export, comments, Windows line
# ends.
of_env() {
    [ ! -r .env ] ||
        sed -nE "s/^[[:space:]]*(export[[:space:]]+)?$1[[:space:]]*[=:][[:space:]]*['\"]?([^'\" ]*).*/\2/p" .env | tr -d '\r' | tail -n 1
}

# Export the mirrors and proxies of .env for programs on this machine. The environment wins. In the station the
# environment has them already.
mirrors_from_env() {
    local name value
    [ "${TRAINSTATION_IMAGE:-}" != 1 ] || return 0
    for name in APT_MIRROR PIP_INDEX_URL NPM_MIRROR HF_ENDPOINT HTTP_PROXY HTTPS_PROXY NO_PROXY NVIDIA_TOOLKIT_MIRROR; do
        value=${!name:-$(of_env "$name")}
        [[ $value != *REPLACE_WITH_* ]] ||
            { echo "error: $name=$value in .env is a placeholder: replace it, or remove that line" >&2; exit 2; }
        [ -z "$value" ] || export "$name=$value"
    done
    [ -n "${HTTP_PROXY:-}${HTTPS_PROXY:-}" ] || return 0
    # Local connections use no proxy. apt and wget read only the names in lower case.
    NO_PROXY=localhost,127.0.0.1,::1${NO_PROXY:+,$NO_PROXY}
    export NO_PROXY no_proxy=$NO_PROXY ${HTTP_PROXY:+"http_proxy=$HTTP_PROXY"} ${HTTPS_PROXY:+"https_proxy=$HTTPS_PROXY"}
}
