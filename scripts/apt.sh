# shellcheck shell=bash
# Sourced by the scripts that use the distribution's packages.

# archive_of SUITE: the address of its main archive as this machine's apt knows it; nothing where it knows none.
archive_of() {
    # shellcheck disable=SC2016 # apt's own variables
    apt-get indextargets --format '$(CREATED_BY) $(REPO_URI) $(CODENAME) $(COMPONENT)' 2>/dev/null |
        awk -v suite="$1" '$1 == "Packages" && $3 == suite && $4 == "main" {print $2; exit}'
}

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
