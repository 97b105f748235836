# shellcheck shell=bash
# Shows that a long command is at work. Sourced by the scripts that have one.

# with_progress WHAT HOW_FAR COMMAND…: runs the command and shows WHAT, what the function HOW_FAR prints, and the seconds. On
# a terminal that is one line that moves; elsewhere a line every 30 seconds. The command is in the foreground, so Ctrl-C
# ends it.
with_progress() {
    local what=$1 how_far=$2 reporter status=0
    shift 2
    report_progress "$what" "$how_far" 9>&- &
    reporter=$!
    "$@" || status=$?
    kill "$reporter" 2>/dev/null || :
    wait "$reporter" 2>/dev/null || :
    [ ! -t 1 ] || printf '\r\033[K'
    return "$status"
}
report_progress() {
    local since=$SECONDS next=30 line
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        if [ ! -t 1 ] && [ $((SECONDS - since)) -lt "$next" ]; then continue; fi
        line="$1: $("$2" 2>/dev/null | tr -d '\000-\037\177'), $((SECONDS - since)) s"
        if [ -t 1 ]; then
            printf '\r\033[K%s' "${line:0:$(($(tput cols 2>/dev/null || echo 80) - 1))}"
        else
            printf '%s\n' "$line"
            next=$((SECONDS - since + 30))
        fi
    done
}
