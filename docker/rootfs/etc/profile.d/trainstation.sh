# shellcheck shell=sh
if [ "$(id -u)" = 0 ]; then
    # TAB after some commands runs files of the current folder (make) or files that dev can change (train).
    # shellcheck disable=SC3044 # bash only
    [ -z "${BASH_VERSION:-}" ] || shopt -u progcomp
else
    # /etc/profile has just set another PATH. Set the PATH of every other way in.
    if [ -r /run/trainstation/path ]; then
        read -r PATH </run/trainstation/path
        export PATH
    fi
    # A person who logs in works on the checkout.
    case $-,$PWD in *i*,"$HOME" | *i*,/) cd /workspace || : ;; esac
    # Greet a person at a terminal, but not a command, scp or another window of tmux.
    case $-${TMUX:+,tmux} in
        *,tmux) ;;
        *i*)
            if [ -t 1 ] && [ ! -e "$HOME/.hushlogin" ]; then
                case ${STATION_LANG:-} in
                    zh_CN) cat /etc/trainstation/greeting.zh_CN ;;
                    *) cat /etc/trainstation/greeting ;;
                esac
            fi
            ;;
    esac
fi
