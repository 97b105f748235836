# shellcheck shell=bash
# Sourced by the scripts that install packages of the distribution.

# apt_install PACKAGE…: waits for another apt's lock as apt itself can, and prints its output only where it fails.
apt_install() {
    local log
    log=$(mktemp)
    if { apt-get update && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"; } >"$log" 2>&1 </dev/null; then
        rm -f "$log"
        return
    fi
    grep -E "^(E|dpkg): " "$log" >&2 || tail -n 5 "$log" >&2
    rm -f "$log"
    return 1
}
