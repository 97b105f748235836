# shellcheck shell=bash
# Installs packages of the distribution. Sourced by scripts that define say and die.

# archive_of SUITE: print the address of its main archive from this machine's apt settings; nothing if there is none.
archive_of() {
    # shellcheck disable=SC2016 # apt's own variables
    apt-get indextargets --format '$(CREATED_BY) $(REPO_URI) $(CODENAME) $(COMPONENT)' 2>/dev/null |
        awk -v suite="$1" '$1 == "Packages" && $3 == suite && $4 == "main" {print $2; exit}'
}

# apt_install PACKAGE…: install packages. Waits up to 300 s for the lock of another apt. apt prints its own errors.
apt_install() {
    command -v apt-get >/dev/null || die "missing: $*; install it with this system's package manager"
    [ "$(id -u)" = 0 ] || die "missing: $*; to install it: sudo apt-get install -y $*"
    say "installing $* with apt-get"
    {
        apt-get -qq update &&
            DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
    } >/dev/null </dev/null || die "could not install $*, see above"
}
