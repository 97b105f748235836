# shellcheck shell=bash
# Shows the progress of a long command. Source it.

# with_progress WHAT HOW_FAR COMMAND…: run the command and show WHAT, the output of the function HOW_FAR, and the
# seconds. On a terminal it rewrites one line; elsewhere it prints a line every 30 seconds. The command runs in the
# foreground, so Ctrl-C ends it.
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
