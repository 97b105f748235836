# shellcheck shell=bash disable=SC2154 # copied_from, engine_options: from the others
# Reads and writes .env and the secrets. Sourced by station.sh.
#
# User dev inside has the number of the checkout's owner and may have replaced any file here. So a link is refused by
# name, and a file is written beside its place and renamed into it as a whole.

owner_of() { stat -c %u "$1" 2>/dev/null || stat -f %u "$1"; } # GNU, or BSD and macOS
group_of() { stat -c %g "$1" 2>/dev/null || stat -f %g "$1"; }
mode_of() { stat -c %a "$1" 2>/dev/null || stat -f %Lp "$1"; }
# Expand ~/ in a path from .env, which no shell has expanded.
expand() { printf '%s' "${1/#\~\//$HOME/}"; }

known="APT_MIRROR BASE_IMAGE BIND_ADDRESS CA_BUNDLE CLUSTER_ADDRESS CLUSTER_NETWORK COMPOSE_FILE COMPOSE_PROFILES CPUS
    CUDA_IMAGE DATASETS_DIR DCGM_EXPORTER_IMAGE DEV_UID EXTRA_APT GPUS GRAFANA_IMAGE GRAFANA_PORT HF_ENDPOINT HTTP_PROXY
    HTTPS_PROXY JUPYTER_PORT KERNEL_IDLE_HOURS LEASES_DIR MEMORY MIN_FREE_MB MONITORING_ADDRESS NO_PROXY NPM_MIRROR NVIDIA_TOOLKIT_MIRROR PROMETHEUS_IMAGE PIDS_LIMIT PIP_INDEX_URL PROTECT_CHECKOUT RUNS_DIR SSH_PORT SSH_PUBLIC_KEY STATION_EXPORTER STATION_HOSTNAME STATION_LANDING STATION_LANG
    STATION_BUILT STATION_IMAGE STATION_LOWERED STATION_TARGET"
settings=""
# Let docker compose read .env, all settings at once. The environment wins over it.
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

# Refuse files in .env and .secrets that may be other files than they seem, before anything is read or written there.
# Also refuse a path that make, ssh and compose would read differently.
check_own_files() {
    local found
    [[ $PWD != *[\'\"\\\$%\`[:cntrl:]]* ]] || die "the path of this checkout holds a quote, a backslash, \$, % or \`: move it to one without"
    found=$(find .env .secrets -maxdepth 1 -type l 2>/dev/null | head -n 1) || :
    [ -z "$found" ] || die "$found is a link, which is not followed: put the file itself there, or rm $found"
    found=$(find .env .secrets -maxdepth 1 \( -path .secrets ! -type d -o ! -path .secrets \( ! -type f -o -links +1 \) \) 2>/dev/null | head -n 1) || :
    [ -z "$found" ] || die "$found is no file, or known under another name too (a hard link): replace it by a copy (cp, then mv), or remove it"
}

# Run a command as the checkout's owner, also under sudo. So root never writes where a link in the checkout leads.
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

# put FOLDER NAME MODE <CONTENT: write a file as a whole, or keep the old one and fail. The folder is entered first and
# checked afterwards, so that no link can replace it in between.
put() {
    local output
    # shellcheck disable=SC2016 # for the inner shell
    output=$(as_owner bash -c '
        umask 077
        cd -P -- "$1" && [ "$PWD" = "$4" ] || { echo "its folder is not $4"; exit 1; }
        room=.
        [ ! -d .secrets ] || room=.secrets # not visible inside, so dev cannot put another file there
        new=$(mktemp "$room/.$2.XXXXXX") || exit 1
        trap "rm -f -- $new" EXIT
        cat >"$new" && chmod "$3" "$new" && mv -f -- "$new" "$2"' - "$1" "$2" "$3" "$(cd -P . && printf '%s' "$PWD${1#.}")" 2>&1) ||
        die "$PWD${1#.}/$2 cannot be written: $(tail -n 1 <<<"$output" | sed 's/.*: //')"
}
secret() { put ./.secrets "$1" 600; }

# Name the lines of .env and .git/config that read like a credential, without printing the credential.
warn_of_credentials() {
    local found name='token|pass(word|wd)?|secret|credentials?|cookie|bearer|webhook|extraheader|_(pat|pwd|dsn|auth)|[^c]_key' place
    for found in .env .git/config; do
        [ -r "$found" ] || continue
        # In a checkout owned by root, dev can read only what everyone can read.
        [ "$(owner_of .)" != 0 ] || [[ $(mode_of "$found") == *[4567] ]] || continue
        while IFS=: read -r place _; do
            say "warning: line $place of $found reads like a credential, and everyone who works inside can read it (docs/security.md)"
        done < <(grep -niE "^[^#;]*($name)[[:space:]]*=[[:space:]\"']*[^[:space:]\"']|^[^#;]*://([^/@:]*:[^/@]+|[^/@]{20,})@" "$found")
    done
}

# remember NAME VALUE …: write settings to .env, over their old values. A setting with an empty value is removed.
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

# Some settings are lowered to what the machine can give. .env keeps the lower value, for docker compose alone, and in
# STATION_LOWERED what was asked for (NAME:ASKED:LOWER,…), so that the setting rises again when its reason is gone.
lowered=() # NAME VALUE …: for .env
# take_back_lowered NAME: set NAME to what a person has asked for, unless that person has changed the lower value since.
take_back_lowered() {
    local name=$1 now=${!1-$(of_env "$1")} one asked value
    export "$name=$now"
    for one in $(setting STATION_LOWERED | tr , ' '); do
        IFS=: read -r one asked value <<<"$one"
        [ "$one=$value" = "$name=$now" ] || continue
        lowered+=("$name" "$asked")
        export "$name=$asked"
    done
}
# lower NAME VALUE WHY
lower() {
    local index kept=() all="$1:${!1}:$2"
    [ "$(of_env "$1")" = "$2" ] || say "$1 $3: lowered to $2 in .env"
    for ((index = 0; index < ${#lowered[@]}; index += 2)); do
        case ${lowered[index]} in
            "$1") ;;
            STATION_LOWERED) all+=,${lowered[index + 1]} ;;
            *) kept+=("${lowered[index]}" "${lowered[index + 1]}") ;;
        esac
    done
    lowered=(${kept[@]+"${kept[@]}"} "$1" "$2" STATION_LOWERED "$all")
    export "$1=$2"
}
say_what_rises() { # a lower value of an earlier start that is not needed any more
    local index
    for ((index = 0; index < ${#lowered[@]}; index += 2)); do
        case ${lowered[index]} in
            STATION_LOWERED) ;;
            *) [ "${lowered[index + 1]}" = "$(of_env "${lowered[index]}")" ] || [[ " ${lowered[*]} " == *[\ ,]"${lowered[index]}":* ]] ||
                say "${lowered[index]} is ${lowered[index + 1]:-the default} again: its limit is gone" ;;
        esac
    done
}

# Print the input lines that look like public keys, with their options. The station checks them more closely.
public_keys() {
    tr -d '\r' | grep -E '^([^#].*[ "])?(ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ AAAA[0-9A-Za-z+/]+=*( |$)' || :
}

# Allow one make up at a time. The lock is on a folder that no process inside can see, and so cannot hold.
one_at_a_time() {
    [ -d .secrets ] || as_owner mkdir -m 700 .secrets 2>/dev/null || [ -d .secrets ] || die ".secrets cannot be made here"
    trap 'rmdir .secrets 2>/dev/null || :' EXIT # if it stays empty
    command -v flock >/dev/null && [ -r .secrets ] || return 0
    exec 9<.secrets
    flock --nonblock 9 && return
    say "another make up is running in this checkout; waiting for it"
    flock 9
}
# Create what is missing: .env, the runs folder and the list of keys. The station itself makes the token and, if the
# owner has no key, a pair of keys. A copy of another checkout gets its own.
make_missing_files() {
    local key keys runs allowed=.secrets/authorized_keys pair=.secrets/id_ed25519
    runs=$(expand "$(setting RUNS_DIR ./runs)")
    if [ ! -e "$runs" ]; then
        case $runs in /*) mkdir -p "$runs" ;; *) as_owner mkdir -p "$runs" ;; esac || die "$runs cannot be created: name another folder as RUNS_DIR in .env"
    fi
    [ -s .env ] || put . .env "$(printf %o $((0666 & ~$(umask))))" <.env.example # an empty .env was made by an engine that mounts it
    # The station trusts the certificates of this machine, because the network may inspect TLS.
    if [ -z "$(setting CA_BUNDLE)" ] && [ -s /etc/ssl/certs/ca-certificates.crt ]; then
        remember CA_BUNDLE /etc/ssl/certs/ca-certificates.crt
    fi
    # These engines can make no folder of the machine, so their stations share a volume.
    if [ -z "$(setting LEASES_DIR)" ] && [[ $(docker info -f '{{.OperatingSystem}} {{.SecurityOptions}}') =~ Docker\ Desktop|name=rootless ]]; then
        remember LEASES_DIR trainstation-leases
    fi
    # In a rootless engine the owner's number is root's inside. The station detects that itself.
    if [ -z "$(setting DEV_UID)" ] && [ "$(owner_of .)" != 0 ] && [[ $engine_options != *name=rootless* ]]; then
        remember DEV_UID "$(owner_of .)" DEV_GID "$(group_of .)"
    fi
    if [ -n "$copied_from" ]; then
        ! as_owner cmp -s $allowed $pair.pub || as_owner rm -f $allowed $pair $pair.pub
        as_owner rm -f .secrets/jupyter_token .secrets/grafana_password
    fi
    if wants_monitoring; then
        [ -s .secrets/grafana_password ] || secret grafana_password < <(random 16)
        # Grafana's own user cannot read the file, so compose copies this variable into the container.
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
            say "ssh: your keys in ~/.ssh may log in (.secrets/authorized_keys)"
        fi
    fi
}
random() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }
wants_monitoring() { [[ ,$(setting COMPOSE_PROFILES), == *,monitoring,* ]]; }
