# shellcheck shell=bash
# Read by each bash that is interactive, and by the one with which sshd begins a command.
case $- in
    *i*) PS1='\u@\h:\w\$ ' ;;
    *)
        # A command begins where a login does. Programs that copy files find those with a relative name in the home folder.
        case "${SSH_CONNECTION:+ssh}${OLDPWD:+moved} $PWD ${BASH_EXECUTION_STRING:-}" in
            *sftp-server* | "ssh $HOME scp "* | "ssh $HOME rsync "* | "ssh $HOME git-"*) ;;
            "ssh $HOME "?*) cd /workspace || : ;;
        esac
        ;;
esac
