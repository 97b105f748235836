# shellcheck shell=sh
if [ "$(id -u)" = 0 ]; then
    # TAB behind some commands runs what lies in the current folder (make) or what dev can change (train).
    # shellcheck disable=SC3044 # bash alone
    [ -z "${BASH_VERSION:-}" ] || shopt -u progcomp
else
    # /etc/profile has just set a PATH of its own; this is the one that every other way in has.
    if [ -r /run/trainstation/path ]; then
        read -r PATH </run/trainstation/path
        export PATH
    fi
    # A person who logs in is here to work on the checkout.
    case $-,$PWD in *i*,"$HOME" | *i*,/) cd /workspace || : ;; esac
    # A person at a terminal reads where they are; a command, scp or another window of tmux has no use for it.
    case $-${TMUX:+,tmux} in
        *,tmux) ;;
        *i*)
            if [ -t 1 ] && [ ! -e "$HOME/.hushlogin" ]; then
                cat /etc/trainstation/greeting
            fi
            ;;
    esac
fi
