# shellcheck shell=bash disable=SC2154 # copied_from, engine_options: from the others
# How .env is read and written, and how secrets are. Sourced by station.sh.
#
# User dev inside has the number of the checkout's owner. So nothing that lies here is trusted to be the file it was:
# a link is refused by name, and what is written appears whole under its name, in the place of whatever lay there.

owner_of() { stat -c %u "$1" 2>/dev/null || stat -f %u "$1"; } # GNU, or BSD and macOS
group_of() { stat -c %g "$1" 2>/dev/null || stat -f %g "$1"; }
mode_of() { stat -c %a "$1" 2>/dev/null || stat -f %Lp "$1"; }
# A path as a person writes it in .env; the shell never saw its tilde.
expand() { printf '%s' "${1/#\~\//$HOME/}"; }

known="APT_MIRROR BASE_IMAGE BIND_ADDRESS CA_BUNDLE CLUSTER_ADDRESS CLUSTER_NETWORK COMPOSE_FILE COMPOSE_PROFILES CPUS
    CUDA_IMAGE DATASETS_DIR DCGM_EXPORTER_IMAGE DEV_UID EXTRA_APT GPUS GRAFANA_IMAGE GRAFANA_PORT HF_ENDPOINT HTTP_PROXY
    HTTPS_PROXY JUPYTER_PORT MEMORY MIN_FREE_MB MONITORING_ADDRESS NO_PROXY NVIDIA_TOOLKIT_MIRROR PROMETHEUS_IMAGE PIDS_LIMIT PIP_INDEX_URL PROTECT_CHECKOUT RUNS_DIR SSH_PORT SSH_PUBLIC_KEY STATION_EXPORTER STATION_HOSTNAME
    STATION_BUILT STATION_IMAGE STATION_TARGET"
settings=""
# Has docker compose read .env, for all settings at once: the environment wins over it.
load_settings() {
    local name
    settings=$({
        printf 'services: {s: {image: i, environment: {'
        for name in $known; do printf "%s: '\${%s-}', " "$name" "$name"; done
        printf '}}}'
    } | docker compose --project-name settings --project-directory . --file - config --format json 2>&1) ||
        die "docker compose cannot read the settings: $(tail -n 1 <<<"$settings")"
}
# setting NAME [DEFAULT]
setting() {
    local value
    value=$(sed -nE "s/^ *\"$1\": \"(.*)\",?$/\1/p" <<<"$settings" | sed 's/\\u0026/\&/g; s/\\\(.\)/\1/g; s/\$\$/$/g')
    printf '%s' "${value:-${2:-}}"
}

# What can be another file than it seems, before anything is read or written there; and a path that make, ssh and compose
# would each read in a way of its own.
check_own_files() {
    local found
    [[ $PWD != *[\'\"\\\$%\`[:cntrl:]]* ]] || die "the path of this checkout holds a quote, a backslash, \$, % or \`: move it to one without"
    found=$(find .env .secrets -maxdepth 1 -type l 2>/dev/null | head -n 1) || :
    [ -z "$found" ] || die "$found is a link, which is not followed: put the file itself there, or remove it (rm $found)"
    found=$(find .env .secrets -maxdepth 1 \( -path .secrets ! -type d -o ! -path .secrets \( ! -type f -o -links +1 \) \) 2>/dev/null | head -n 1) || :
    [ -z "$found" ] || die "$found is no file, or known under another name too (a hard link), which is not trusted: make it anew with cp and mv, or remove it"
}

# Runs a command as the checkout's owner, also under sudo: whatever a link in a person's checkout leads to, root does
# not write there.
as_owner() {
    local uid gid
    uid=$(owner_of .) gid=$(group_of .)
    if [ "$(id -u)" != 0 ] || [ "$uid" = 0 ]; then
        "$@"
    elif command -v setpriv >/dev/null; then
        setpriv --reuid="$uid" --regid="$gid" --clear-groups -- "$@"
    else
        sudo -n -u "#$uid" -g "#$gid" -- "$@"
    fi
}

# put FOLDER NAME MODE <CONTENT: the file with that content, or the old one and an error; never half of it. The folder
# is entered first and then looked at: no link can take its place in between.
put() {
    local output
    # shellcheck disable=SC2016 # for the inner shell
    output=$(as_owner bash -c '
        umask 077
        cd -P -- "$1" && [ "$PWD" = "$4" ] || { echo "its folder is not $4"; exit 1; }
        room=.
        [ ! -d .secrets ] || room=.secrets # which is not seen from inside: nobody can put another file in its place
        new=$(mktemp "$room/.$2.XXXXXX") || exit 1
        trap "rm -f -- $new" EXIT
        cat >"$new" && chmod "$3" "$new" && mv -f -- "$new" "$2"' - "$1" "$2" "$3" "$(cd -P . && printf '%s' "$PWD${1#.}")" 2>&1) ||
        die "$PWD${1#.}/$2 cannot be written: $(tail -n 1 <<<"$output" | sed 's/.*: //')"
}
secret() { put ./.secrets "$1" 600; }

# Names lines of .env and .git/config that read like a credential; never what it is.
warn_of_credentials() {
    local found name='token|passw|secret|credential|extraheader|[^c]_key' place
    for found in .env .git/config; do
        [ -r "$found" ] || continue
        # In a checkout of root's dev reads what everybody reads.
        [ "$(owner_of .)" != 0 ] || [[ $(mode_of "$found") == *[4567] ]] || continue
        while IFS=: read -r place _; do
            say "warning: line $place of $found reads like a credential, and whoever works inside can read that file (docs/security.md)"
        done < <(grep -niE "^[^#;]*($name)[[:space:]]*=[[:space:]\"']*[^[:space:]\"']|^[^#;]*://([^/@:]*:[^/@]+|[^/@]{20,})@" "$found")
    done
}

# remember NAME VALUE …: puts settings into .env, in the place of what was there; one without a value is removed.
remember() {
    local names="" lines="" before after
    while [ $# -gt 0 ]; do
        names+="|$1"
        [ -z "$2" ] || lines+=$'\n'"$1=$([[ $2 =~ ^[A-Za-z0-9_./:,-]*$ ]] && printf '%s' "$2" || printf "'%s'" "$2")"
        shift 2
    done
    before=$(cat .env)
    after=$(sed -E "/^[[:space:]]*(export[[:space:]]+)?(${names#|})[[:space:]]*[=:]/d" .env)$lines
    [ "$(sort <<<"$after")" = "$(sort <<<"$before")" ] || put . .env "$(mode_of .env)" <<<"$after"
}

# The lines of a file that look like public keys, options before them included. The station reads them more closely.
public_keys() {
    tr -d '\r' | grep -E '^([^#].*[ "])?(ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ AAAA[0-9A-Za-z+/]+=*( |$)' || :
}

# One make up at a time. The lock is on a folder that nobody inside can see, and so cannot hold.
one_at_a_time() {
    [ -d .secrets ] || as_owner mkdir -m 700 .secrets 2>/dev/null || [ -d .secrets ] || die ".secrets cannot be made here"
    trap 'rmdir .secrets 2>/dev/null || :' EXIT # nothing came of it
    command -v flock >/dev/null && [ -r .secrets ] || return 0
    exec 9<.secrets
    flock --nonblock 9 && return
    say "another make up is at work in this checkout; waiting for it"
    flock 9
}
# Makes what is missing: .env, runs, and who may log in. Token, and a pair of keys where there is none of the owner's, the
# station makes by itself; a copy of another checkout gets its own.
make_missing_files() {
    local key keys runs allowed=.secrets/authorized_keys pair=.secrets/id_ed25519
    runs=$(expand "$(setting RUNS_DIR ./runs)")
    if [ ! -e "$runs" ]; then
        case $runs in /*) mkdir -p "$runs" ;; *) as_owner mkdir -p "$runs" ;; esac || die "$runs cannot be made"
    fi
    [ -s .env ] || put . .env "$(printf %o $((0666 & ~$(umask))))" <.env.example # an empty one an engine made, to mount it
    # What this machine trusts the station trusts: a network may check TLS by certificates of its own.
    if [ -z "$(setting CA_BUNDLE)" ] && [ -s /etc/ssl/certs/ca-certificates.crt ]; then
        remember CA_BUNDLE /etc/ssl/certs/ca-certificates.crt
    fi
    # In a rootless engine the owner's number is root's inside, which the station finds by itself.
    if [ -z "$(setting DEV_UID)" ] && [ "$(owner_of .)" != 0 ] && [[ $engine_options != *name=rootless* ]]; then
        remember DEV_UID "$(owner_of .)" DEV_GID "$(group_of .)"
    fi
    if [ -n "$copied_from" ]; then
        ! as_owner cmp -s $allowed $pair.pub || as_owner rm -f $allowed $pair $pair.pub
        as_owner rm -f .secrets/jupyter_token .secrets/grafana_password
    fi
    if wants_monitoring; then
        [ -s .secrets/grafana_password ] || secret grafana_password < <(random 16)
        # Grafana has a user of its own, who cannot read the file: compose copies this variable into the container.
        GRAFANA_PASSWORD=$(as_owner cat .secrets/grafana_password)
        export GRAFANA_PASSWORD
    fi
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    if [ -n "$key" ]; then
        secret authorized_keys < <(public_keys <"$key")
    elif [ ! -s $allowed ]; then
        keys=$({ cat "$HOME"/.ssh/id_*.pub 2>/dev/null || :; } | public_keys)
        if [ -n "$keys" ]; then
            secret authorized_keys <<<"$keys"
            say "ssh: your own keys in ~/.ssh may log in (.secrets/authorized_keys)"
        fi
    fi
}
random() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }
wants_monitoring() { [[ ,$(setting COMPOSE_PROFILES), == *,monitoring,* ]]; }
