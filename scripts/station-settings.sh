# shellcheck shell=bash disable=SC2154 # copied_from, engine_options: from station.sh
# How .env is read and written, and how secrets are. Sourced by station.sh.
#
# User dev inside has the number of the checkout's owner. So nothing that lies here is trusted to be the file it was:
# a link is refused by name, and what is written appears whole under its name, in the place of whatever lay there.

owner_of() { stat -c %u "$1" 2>/dev/null || stat -f %u "$1"; } # GNU, or BSD and macOS
group_of() { stat -c %g "$1" 2>/dev/null || stat -f %g "$1"; }
names_of() { stat -c %h "$1" 2>/dev/null || stat -f %l "$1"; }
mode_of() { stat -c %a "$1" 2>/dev/null || stat -f %Lp "$1"; }
# A path as a person writes it in .env; the shell never saw its tilde.
expand() { printf '%s' "${1/#\~\//$HOME/}"; }

# env_value NAME [FILE]: the value in .env, as docker compose reads it (byte order mark, line ends of Windows, export,
# quotes, comments, ${VARIABLE}); fails where it is not set.
env_value() {
    local value quote variable
    [ -r "${2:-.env}" ] || return 1
    value=$(LC_ALL=C awk -v name="$1" '
        NR == 1 { sub(/^\357\273\277/, "") }
        { sub(/\r$/, ""); sub(/^[ \t]*(export[ \t]+)?/, "") }
        index($0, name) != 1 { next }
        {
            rest = substr($0, length(name) + 1)
            if (rest !~ /^[ \t]*[=:]/) next
            sub(/^[ \t]*[=:][ \t]*/, "", rest)
            quote = substr(rest, 1, 1)
            if (quote == "\"" || quote == "\047") {
                value = ""
                for (i = 2; i <= length(rest) && (c = substr(rest, i, 1)) != quote; i++) {
                    if (c == "\\" && quote == "\"") c = substr(rest, ++i, 1)
                    value = value c
                }
            } else {
                quote = " "
                sub(/[ \t]+#.*/, "", rest)
                sub(/[ \t]+$/, "", rest)
                value = rest
            }
            found = quote value
        }
        END { if (found == "") exit 1; print found }' "${2:-.env}") || return 1
    quote=${value:0:1} value=${value:1}
    if [ "$quote" != "'" ]; then
        while [[ $value =~ \$(\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)) ]]; do
            variable=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
            value=${value/"${BASH_REMATCH[0]}"/${!variable:-}}
        done
    fi
    printf '%s' "$value"
}

# A setting: the environment first, then .env, then the default; as docker compose itself reads them.
setting() {
    local name=$1 value
    if [ -n "${!name+set}" ]; then value=${!name}; else value=$(env_value "$name") || value=""; fi
    printf '%s' "${value:-${2:-}}"
}

# What can be another file than it seems, before anything is read or written there.
check_own_files() {
    local file
    for file in .env .secrets .secrets/jupyter_token .secrets/authorized_keys .secrets/id_ed25519 \
        .secrets/id_ed25519.pub .secrets/known_hosts .secrets/grafana_password; do
        [ ! -L "$file" ] || die "$file is a link, which is not followed: put the file itself there, or remove it (rm $file)"
        [ -e "$file" ] || continue
        if [ "$file" = .secrets ]; then
            [ -d "$file" ] || die "$file is no folder: move it away, make up makes one"
            continue
        fi
        [ -f "$file" ] || die "$file is no file: remove it, make up makes one"
        [ "$(names_of "$file")" = 1 ] ||
            die "$file is known under another name too (a hard link), which is not trusted: make it anew with cp and mv, or remove it"
    done
    [ ! -e .env ] || [ -r .env ] || die ".env cannot be read: it belongs to user $(owner_of .env)"
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
    local said
    # shellcheck disable=SC2016 # for the inner shell
    said=$(as_owner bash -c '
        umask 077
        cd -P -- "$1" && [ "$PWD" = "$4" ] || { echo "its folder is not $4"; exit 1; }
        room=.
        [ ! -d .secrets ] || room=.secrets # which is not seen from inside: nobody can put another file in its place
        new=$(mktemp "$room/.$2.XXXXXX") || exit 1
        trap "rm -f -- $new" EXIT
        cat >"$new" && chmod "$3" "$new" || exit 1
        sync "$new" 2>/dev/null || :
        mv -f -- "$new" "$2"' - "$1" "$2" "$3" "$(cd -P . && printf '%s' "$PWD${1#.}")" 2>&1) ||
        die "$PWD${1#.}/$2 cannot be written: $(tail -n 1 <<<"$said" | sed 's/.*: //')"
}
secret() { put ./.secrets "$1" 600; }

# Names, in .env and .git/config, of what reads like a credential; never what it is.
credentials() {
    local file
    for file in .env .git/config; do
        [ -f "$file" ] && [ -r "$file" ] || continue
        # In a checkout of root's dev reads what everybody reads.
        [ "$(owner_of .)" != 0 ] || [[ $(mode_of "$file") == *[4567] ]] || continue
        awk -v file="$file" '
            { sub(/^\357\273\277/, ""); sub(/\r$/, ""); sub(/^[ \t]*(export[ \t]+)?/, "") }
            /^\[/ { section = $0; gsub(/[]["]/, "", section); sub(/ +/, ".", section); section = section "."; next }
            /^[#;]/ || !match($0, /[=:]/) { next }
            {
                name = substr($0, 1, RSTART - 1); value = substr($0, RSTART + 1)
                gsub(/[ \t]/, "", name); gsub(/[ \t"\047]/, "", value); upper = toupper(name)
                secret = upper ~ /TOKEN|PASSW|SECRET|CREDENTIAL|EXTRAHEADER/ || upper ~ /_KEY$/ && upper !~ /PUBLIC_KEY$/
                if (upper ~ /_(FILE|PATH)$/) secret = 0
                if (value ~ /:\/\/[^\/@:]*:[^\/@]+@/ || match(value, /^https?:\/\/[^\/@]+@/) && RLENGTH > 28) secret = 1
                if (value != "" && secret) print file ": " section name
            }' "$file"
    done
}
warn_of_credentials() {
    local found
    while IFS= read -r found; do
        say "warning: $found reads like a credential, and whoever works inside can read that file (docs/security.md)"
    done < <(credentials)
}

# remember NAME VALUE …: puts settings into .env, each in the place of what was there; one without a value is removed.
remember() {
    local names=" " lines="" changed=""
    while [ $# -gt 0 ]; do
        names+="$1 "
        [ -z "$2" ] || lines+="$1=$(in_quotes "$2")"$'\n'
        [ "$(env_value "$1")" = "$2" ] || changed=yes
        shift 2
    done
    [ -n "$changed" ] || return 0
    put . .env "$(mode_of .env)" < <(
        LC_ALL=C awk -v names="$names" '
            { key = $0; sub(/^\357\273\277/, "", key); sub(/^[ \t]*(export[ \t]+)?/, "", key); sub(/[ \t]*[=:].*/, "", key) }
            key == "" || index(names, " " key " ") == 0' .env
        printf '%s' "$lines"
    )
}
in_quotes() { if [[ $1 =~ ^[A-Za-z0-9_./:,-]*$ ]]; then printf '%s' "$1"; else printf "'%s'" "$1"; fi; }

# The lines of a file that look like public keys, options before them included. The station reads them more closely.
public_keys() {
    tr -d '\r' | grep -E '^([^#].*[ "])?(ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ AAAA[0-9A-Za-z+/]+=*( |$)' || :
}

made="" made_runs=""
make_secrets_folder() {
    [ ! -d .secrets ] || return 0
    if as_owner mkdir -m 700 .secrets 2>/dev/null; then made+=" .secrets/"; else [ -d .secrets ] || die ".secrets cannot be made here"; fi
}
# Whoever made them: the engine makes the folder 755.
close_secrets() {
    local opened
    opened=$(as_owner find .secrets -maxdepth 1 \( -type d ! -perm 700 -exec chmod 700 {} \; -o -type f ! -perm 600 -exec chmod 600 {} \; \) -print 2>/dev/null) || :
    [ -z "$opened" ] || say "secrets: .secrets was open to others; the folder is 700 now, its files are 600"
}
# One make up at a time. The lock is on a folder that nobody inside can see, and so cannot hold.
one_at_a_time() {
    make_secrets_folder
    command -v flock >/dev/null && [ -r .secrets ] || return 0
    exec 9<.secrets
    flock --nonblock 9 && return
    say "another make up is at work in this checkout; waiting for it"
    flock 9
}
# Makes what is missing: .env, the token, who may log in. What was made goes again if not all of it could be. A copy of
# another checkout gets a token and a pair of its own.
make_missing_files() {
    local key keys work runs exceptions token=.secrets/jupyter_token allowed=.secrets/authorized_keys
    runs=$(expand "$(setting RUNS_DIR ./runs)")
    if [ ! -e "$runs" ]; then
        case $runs in /*) mkdir -p "$runs" ;; *) as_owner mkdir -p "$runs" ;; esac || die "$runs cannot be made"
        made_runs=$runs
    fi
    if [ ! -s .env ]; then # an empty one is what an engine leaves that mounted it before it was there
        made+=" .env"
        put . .env "$(printf %o $((0666 & ~$(umask))))" <.env.example
    fi
    # What this machine trusts the station trusts: a network may check TLS by certificates of its own.
    if ! env_value CA_BUNDLE >/dev/null && [ -s /etc/ssl/certs/ca-certificates.crt ]; then
        remember CA_BUNDLE /etc/ssl/certs/ca-certificates.crt
    fi
    # The docker client's own settings may name a proxy, which every container then has, and exceptions to it.
    exceptions=$(tr -d '\n' 2>/dev/null <"${DOCKER_CONFIG:-$HOME/.docker}/config.json" | sed -nE 's/.*"noProxy" *: *"([^"]*)".*/\1/p') || exceptions=""
    if [ -n "$exceptions" ] && [ -z "$(setting NO_PROXY)$(setting no_proxy)" ]; then remember NO_PROXY "$exceptions"; fi
    # In a rootless engine the owner's number is root's inside, which the station finds by itself.
    if ! env_value DEV_UID >/dev/null && [ "$(owner_of .)" != 0 ] && [[ $engine_options != *name=rootless* ]]; then
        remember DEV_UID "$(owner_of .)" DEV_GID "$(group_of .)"
    fi
    choose_unknown_user

    make_secrets_folder
    close_secrets
    if [ ! -s "$token" ] || [ -n "$copied_from" ]; then
        [ -s "$token" ] || made+=" $token"
        secret jupyter_token < <(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    fi
    make_grafana_password
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    if [ -n "$key" ]; then
        secret authorized_keys < <(public_keys <"$key")
    elif [ ! -s "$allowed" ] || { [ -n "$copied_from" ] && cmp -s "$allowed" .secrets/id_ed25519.pub; }; then
        # The station makes a pair when it starts where this cannot: ssh-keygen works for users with a name only.
        { command -v ssh-keygen && id -un; } >/dev/null 2>&1 || return 0
        keys=$({ cat "$HOME"/.ssh/id_*.pub 2>/dev/null || :; } | public_keys)
        [ -s "$allowed" ] || made+=" $allowed"
        if [ -n "$keys" ]; then
            secret authorized_keys <<<"$keys"
            say "ssh: your own keys in ~/.ssh may log in (.secrets/authorized_keys)"
        else
            if ! { work=$(mktemp -d) && ssh-keygen -q -t ed25519 -N '' -C trainstation -f "$work/id_ed25519"; } </dev/null; then
                die "no ssh key could be made in ${TMPDIR:-/tmp}"
            fi
            [ -s .secrets/id_ed25519 ] || made+=" .secrets/id_ed25519 .secrets/id_ed25519.pub"
            secret id_ed25519 <"$work/id_ed25519"
            secret id_ed25519.pub <"$work/id_ed25519.pub"
            secret authorized_keys <"$work/id_ed25519.pub"
            rm -rf "$work"
        fi
    fi
}
# In a checkout of root's, dev inside is a user whom this machine does not know: a person of the host with dev's number
# would read the token and write in runs. The usual number stands in the first step, for docker compose alone.
choose_unknown_user() {
    local usual number
    [ "$(owner_of .)" = 0 ] || return 0
    usual=$(sed -n 's/^unknown_user=//p' docker/rootfs/usr/local/lib/trainstation/steps/10-validate)
    number=$(setting DEV_UID)
    if [ -z "$number" ]; then
        number=$usual
        while { getent passwd "$number" || getent group "$number"; } >/dev/null 2>&1; do number=$((number + 1)); done
        [ "$number" = "$usual" ] || remember DEV_UID "$number" DEV_GID "$number"
    fi
    getent passwd "$number" >/dev/null 2>&1 || number+=", whom this machine does not know"
    say "this checkout belongs to root: inside, work is done as user $number"
}
wants_monitoring() { [[ ,$(setting COMPOSE_PROFILES), == *,monitoring,* ]]; }
# Grafana has a user of its own, who cannot read the file: compose copies its text into the container, from a variable
# that it gets here alone.
make_grafana_password() {
    local password=.secrets/grafana_password
    wants_monitoring || return 0
    if [ ! -s "$password" ] || [ -n "$copied_from" ]; then
        [ -s "$password" ] || made+=" $password"
        secret grafana_password < <(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    fi
    GRAFANA_PASSWORD=$(as_owner cat "$password")
    export GRAFANA_PASSWORD
}
files_are_made() {
    [ -z "$made" ] || say "made:$made"
    made="" made_runs=""
}
# When make up ends here, what was only just made is taken away again.
unmake() {
    local file
    for file in $made; do
        if [ "$file" = .secrets/ ]; then as_owner rm -rf .secrets
        else as_owner rm -f "$file"
        fi
    done
    [ -z "$made_runs" ] || rmdir "$made_runs" 2>/dev/null || :
    made="" made_runs=""
    return 0
}
