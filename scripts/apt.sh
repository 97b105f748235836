# shellcheck shell=bash
# Packages from the distribution, where another apt may be at work: many machines update themselves. Sourced by the
# scripts that install something.

# with_apt COMMAND…: runs apt-get or dpkg without its output; waits for another one's locks, five minutes at most. Where the
# command fails it prints its last line. (apt's own option to wait leaves out the lock of its lists.)
with_apt() {
    local log waits="" since=$SECONDS
    log=$(mktemp)
    until LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 </dev/null; do
        if ! grep -qE 'Could not get lock|lock was locked|is another process using it' "$log" || [ $((SECONDS - since)) -ge 300 ]; then
            printf '%s: %s\n' "$1" "$({ grep -E '^(E|dpkg): ' "$log" || grep . "$log"; } | tail -n 1)" >&2
            rm -f "$log"
            return 1
        fi
        [ -n "$waits" ] || echo "another apt is at work ($(grep -oE 'process [0-9]+ \([^)]*\)' "$log" | head -n 1)): waiting for it" >&2
        waits=yes
        sleep 2
    done
    rm -f "$log"
}
