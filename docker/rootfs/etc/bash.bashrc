# shellcheck shell=bash
# Every interactive bash reads this, and the bash with which sshd starts a command.
case $- in
    *i*) PS1='\u@\h:\w\$ ' ;;
    *)
        # A command starts in the same folder as a login. Programs that copy files use names relative to the home
        # folder.
        case "${SSH_CONNECTION:+ssh}${OLDPWD:+moved} $PWD ${BASH_EXECUTION_STRING:-}" in
            *sftp-server* | "ssh $HOME scp "* | "ssh $HOME rsync "* | "ssh $HOME git-"*) ;;
            "ssh $HOME "?*) cd /workspace || : ;;
        esac
        ;;
esac
