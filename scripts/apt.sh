# shellcheck shell=bash
# Sourced by the scripts that use the distribution's packages; they have say and die.

# archive_of SUITE: the address of its main archive as this machine's apt knows it; nothing where it knows none.
archive_of() {
    # shellcheck disable=SC2016 # apt's own variables
    apt-get indextargets --format '$(CREATED_BY) $(REPO_URI) $(CODENAME) $(COMPONENT)' 2>/dev/null |
        awk -v suite="$1" '$1 == "Packages" && $3 == suite && $4 == "main" {print $2; exit}'
}

# apt_install PACKAGE…: waits for another apt's lock as apt itself can; what goes wrong apt says.
apt_install() {
    command -v apt-get >/dev/null || die "missing here: $*; install it with this system's package manager"
    [ "$(id -u)" = 0 ] || die "missing here: $*; please run: sudo apt-get install -y $*"
    say "installing $* with apt-get"
    {
        apt-get -qq update &&
            DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
    } >/dev/null </dev/null || die "could not install $*, see above"
}
