#!/bin/sh
# Keeps machines of the same network away from containers. Before Docker 28, a machine that adds a route to a
# container's network reaches every port that is published on 127.0.0.1 only.
#
#     firewall.sh set      (as root) set the rules now, and with systemd before each start of the engine
#     firewall.sh check    exit code 0 if they are set
#
# The rules do what Docker 28 does itself: no machine outside opens a connection to a container's own address.
# Published ports work as before (DNAT). Docker keeps the chain DOCKER-USER, also when it restarts. systemd runs a
# copy that root owns, because this checkout may belong to another user.
set -eu

copy=/usr/local/sbin/trainstation-firewall
unit=/etc/systemd/system/docker.service.d/trainstation-firewall.conf
mark=/run/trainstation-firewall # for users who may not call iptables; a boot removes it and the rules

say() { echo "firewall: $*"; }
die() { echo "firewall: $*" >&2; exit 1; }

are_set() {
    iptables -w 5 -C DOCKER-USER -j TRAINSTATION && iptables -w 5 -C TRAINSTATION -o br-+ -j DROP
} >/dev/null 2>&1

set_rules() {
    iptables -w 5 -N DOCKER-USER 2>/dev/null || :
    # Replace the whole chain at once, so that it is never missing. docker0 and br-… are Docker's bridges.
    iptables-restore -w 5 --noflush <<'RULES'
*filter
:TRAINSTATION - [0:0]
-A TRAINSTATION -m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j RETURN
-A TRAINSTATION -i docker0 -j RETURN
-A TRAINSTATION -i br-+ -j RETURN
-A TRAINSTATION -o docker0 -j DROP
-A TRAINSTATION -o br-+ -j DROP
COMMIT
RULES
    iptables -w 5 -C DOCKER-USER -j TRAINSTATION 2>/dev/null || iptables -w 5 -I DOCKER-USER -j TRAINSTATION
    : >"$mark"
}

keep_for_later_starts() {
    [ -d /run/systemd/system ] || return 0
    install -D -m 755 "$0" "$copy"
    install -D -m 644 /dev/stdin "$unit" <<UNIT
[Service]
ExecStartPre=-$copy start
UNIT
    systemctl daemon-reload
}

PATH=$PATH:/usr/sbin:/sbin
case ${1:-} in
    check) are_set ;;
    start) set_rules ;;
    set)
        [ "$(id -u)" = 0 ] || die "only root can set the rules: sudo make engine"
        command -v iptables >/dev/null || die "iptables is missing, and Docker needs it too: apt-get install iptables"
        was_set=yes
        are_set || was_set=""
        set_rules || die "iptables refused the rules, see above"
        keep_for_later_starts
        [ -n "$was_set" ] || say "machines of the same network no longer reach containers past BIND_ADDRESS"
        ;;
    *) die "usage: firewall.sh set|check" ;;
esac
