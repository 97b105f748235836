# shellcheck shell=bash disable=SC2154,SC2034 # jupyter_set, ssh_set: from station-ports.sh; shm_lowered: for station-identity.sh
# What can be wrong before the station starts, each in one line that says what to do. Sourced by station.sh, which
# runs these before it makes or changes anything.

check_engine() {
    local answer
    command -v docker >/dev/null ||
        die "no Docker here. make engine installs and starts it (Debian, Ubuntu, as root); make demo trains without one"
    answer=$(docker version --format '{{.Server.Version}}' 2>&1) && return
    case $answer in
        *'permission denied'*) die "you may not use the Docker engine: sudo usermod -aG docker $(id -un 2>/dev/null || id -u), then log in again" ;;
        *) die "no Docker engine answers. make engine installs and starts one (Debian, Ubuntu, as root); make demo trains without one" ;;
    esac
}

check_compose() {
    local version
    version=$(docker compose version --short 2>/dev/null) || die "Docker's compose plugin is missing: make engine installs it, as root"
    version=${version#v}
    case $version in
        1.* | 2.[0-9].* | 2.1[0-9].* | 2.2[0-3].*) die "docker compose $version is too old, 2.24 or newer is needed: make engine, as root" ;;
    esac
}

# An engine that maps everybody inside to users of its own lets nobody in there write to the checkout; and without the
# mapping, for one container, the image's files are not root's.
check_users() {
    engine_options=$(docker info -f '{{.SecurityOptions}}' 2>/dev/null)
    case $engine_options in
        *name=userns*) die "this engine maps users (userns-remap), so nobody inside could write to this checkout: use an engine without, or a rootless one" ;;
    esac
}

# The Dockerfile's cache and secret mounts are BuildKit's.
check_buildx() {
    local server
    server=$(docker version --format '{{range .Server.Components}}{{.Name}} {{end}}' 2>/dev/null)
    case $server in *[Pp]odman*) die "this engine is Podman, which builds without BuildKit: build with Docker Engine 20.10 or newer (make engine)" ;; esac
    docker buildx version >/dev/null 2>&1 ||
        die "Docker's buildx plugin is missing, which building the image takes: make engine installs it, as root"
}

# Compose files besides this checkout's own, from COMPOSE_FILE. One that dev can write to would be dev's way out.
more_files() {
    local IFS=: file
    for file in $(setting COMPOSE_FILE); do
        case ${file#./} in '' | docker-compose.yml | docker-compose.cpu.yml | docker-compose.cluster.yml) ;; *) printf '%s\n' "$file" ;; esac
    done
}
check_compose_files() {
    local file said
    while IFS= read -r file; do
        [ -n "$file" ] || continue
        [ -f "$file" ] || die "COMPOSE_FILE names $file, which is not there"
        check_place COMPOSE_FILE "$file"
    done < <(more_files)
    said=$(compose config --quiet 2>&1) || die "docker compose cannot read the settings: $(tail -n 1 <<<"$said")"
}

# check_place NAME PATH: what lies in a folder that is writable inside is dev's to replace, by a link to anywhere; the
# engine follows it at each start, also where nobody asks make. docker-compose.yml lists those folders.
check_place() {
    local folder here place runs
    here=$(cd -P . && printf '%s' "$PWD")
    place=$(cd -P -- "$(dirname -- "$2")" 2>/dev/null && printf '%s/%s' "$PWD" "$(basename -- "$2")") || return 0
    runs=$(cd -P -- "$(expand "$(setting RUNS_DIR ./runs)")" 2>/dev/null && printf '%s' "$PWD") || runs=$here/runs
    [ -z "$(setting RUNS_DIR)" ] || [[ $here/ != "${runs%/}"/* ]] || die "RUNS_DIR=$(setting RUNS_DIR) holds this checkout, all of which user dev inside could then change: name another folder"
    for folder in "$here"/{train,tests,notebooks,projects,docs,runs,datasets} "$runs"; do # runs may be kept elsewhere
        [[ $place != "$folder"/* ]] || die "$1=$2 lies in ${folder#"$here"/}/, where user dev inside can put anything else in its place: move it out of there"
    done
}

# check_folder NAME FOLDER: where the protection is or was lifted, dev could replace a folder of the checkout, ./runs for one;
# so a link in it is not followed: it could lead to the host's root.
check_folder() {
    local path=$2 rest
    case $path in "$PWD"/*) path=${path#"$PWD"/} ;; /*) return ;; esac
    rest=$path path=.
    while [ -n "$rest" ]; do
        [ "${rest%%/*}" != .. ] || return 0
        path+=/${rest%%/*}
        [ ! -L "$path" ] || die "${path#./} is a link to $(readlink "$path"): name that folder itself in .env, as $1, if it is what you mean"
        case $rest in */*) rest=${rest#*/} ;; *) rest="" ;; esac
    done
}

check_number() { # NAME DEFAULT MOST [LEAST]
    local value
    value=$(setting "$1" "$2")
    [[ $value =~ ^[1-9][0-9]{0,8}$ ]] && [ "$value" -le "$3" ] && [ "$value" -ge "${4:-1}" ] ||
        die "$1=$value: it is a number from ${4:-1} to $3"
}

# megabytes SIZE: of a size as compose reads it (64g, 512MB, a number of bytes); fails where it is none.
megabytes() {
    [[ $1 =~ ^([0-9]{1,12}(\.[0-9]{1,3})?)([kKmMgGtT]?)[bB]?$ ]] || return 1
    awk -v n="${BASH_REMATCH[1]}" -v unit="${BASH_REMATCH[3]:-b}" 'BEGIN { printf "%d", n * 1024 ^ (index("bkmgt", tolower(unit)) - 3) }'
}
# Shared memory is taken from the machine's and is not given back under pressure: it gets half of it at most.
check_limits() {
    local value memory=0 shm most machine
    read -r machine most < <(docker info -f '{{.MemTotal}} {{.NCPU}}')
    machine=$((machine / 1048576))
    value=$(setting MEMORY 0)
    if [ "$value" != 0 ]; then
        memory=$(megabytes "$value") || memory=0
        [ "$memory" -ge 1024 ] || die "MEMORY=$value: it is a size such as 64g, 1g or more"
    fi
    value=$(setting CPUS 0)
    if [ "$value" != 0 ]; then
        { [[ $value =~ ^[0-9]{1,4}(\.[0-9]{1,2})?$ && $value =~ [1-9] ]] && awk "BEGIN { exit ($value > $most) }"; } ||
            die "CPUS=$value: it is a number of processors, such as 1.5, and this machine has $most"
    fi
    check_number PIDS_LIMIT 32768 4194304 512
    value=$(setting SHM_SIZE)
    shm=$(megabytes "${value:-16g}") || shm=0
    [ "$shm" -gt 0 ] || die "SHM_SIZE=$value: it is a size such as 16g"

    if [ "$memory" -eq 0 ] || [ "$memory" -gt "$machine" ]; then memory=$machine; fi
    [ "$shm" -gt $((memory / 2)) ] || return 0
    say "SHM_SIZE=${value:-16g} is more than half of the memory ($memory MB): it becomes $((memory / 2))m, in .env"
    export SHM_SIZE=$((memory / 2))m
    shm_lowered=yes # for remember_identity
}

check_monitoring() {
    local service name usual port
    while read -r service name usual; do
        check_number "$name" "$usual" 65535
        port=$(setting "$name" "$usual")
        [ -z "$(docker ps --quiet --filter "publish=$port" --filter "$(of_project "$project")" \
            --filter "label=com.docker.compose.service=$service")" ] || continue # our own
        ! busy "$port" || die "port $port is taken by $(who_has "$port"): set $name in .env to a free one"
    done <<<"grafana GRAFANA_PORT 3000
prometheus PROMETHEUS_PORT 9090"
    [ "$(setting STATION_EXPORTER on)" = on ] || die "COMPOSE_PROFILES=monitoring with STATION_EXPORTER=off: there would be nothing to see; leave one out"
}

is_ipv4() {
    local octet
    [[ $1 =~ ^(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})$ ]] || return 1
    for octet in "${BASH_REMATCH[@]:1}"; do [ "$octet" -le 255 ] || return 1; done
}
ipv4_number() { local IFS=. octets; read -ra octets <<<"$1"; echo $(((octets[0] << 24) + (octets[1] << 16) + (octets[2] << 8) + octets[3])); }
# within ADDRESS SUBNET: 10.0.0.7 in 10.0.0.0/24?
within() {
    local mask=$(((0xffffffff << (32 - ${2#*/})) & 0xffffffff))
    [ $(($(ipv4_number "$1") & mask)) = $(($(ipv4_number "${2%/*}") & mask)) ]
}
# An address of the station's own in a network where stations of other machines are.
check_cluster() {
    local network address driver subnet subnets=""
    network=$(setting CLUSTER_NETWORK) address=$(setting CLUSTER_ADDRESS)
    [ -n "$network$address" ] || return 0
    [ -n "$network" ] || die "CLUSTER_ADDRESS=$address, but no network: set CLUSTER_NETWORK to the one that it is in (docs/clusters.md)"
    is_ipv4 "$address" || die "CLUSTER_ADDRESS=$address: it is the address that this station gets in $network, such as 10.0.0.51"
    { [[ $network =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] && driver=$(docker network inspect -f '{{.Driver}}' "$network" 2>/dev/null); } ||
        die "CLUSTER_NETWORK=$network is no network of this engine: docker network ls lists them, docs/clusters.md says how one is made"
    case $network in
        bridge | host | none) die "CLUSTER_NETWORK=$network is the engine's own, which gives no address of one's choice: docs/clusters.md says how one is made" ;;
    esac
    while read -r subnet; do
        [[ $subnet == *.*/* ]] || continue
        subnets+=" $subnet"
        ! within "$address" "$subnet" || return 0
    done < <(docker network inspect -f '{{range .IPAM.Config}}{{println .Subnet}}{{end}}' "$network")
    die "CLUSTER_ADDRESS=$address is not in $network ($driver), which has${subnets:- no IPv4 addresses}"
}

check_settings() {
    local gpus bind bare key data index
    gpus=$(setting GPUS)
    case $gpus in
        '' | all | none) ;;
        *[!0-9,]* | ,* | *,,* | 0*[!,]) [[ $gpus =~ ^0(,[0-9]+)+,?$ ]] ||
            die "GPUS=$gpus: it is all, none, a count such as 2, or ids such as 0,1 (a single id: 2,)" ;;
        0) die "GPUS=0: for no GPU say GPUS=none; for the one with id 0 say GPUS=0, (with the comma)" ;;
    esac

    bind=$(setting BIND_ADDRESS 127.0.0.1)
    is_ipv4 "$bind" || [[ $bind =~ ^\[[0-9a-fA-F:]+\]$ ]] ||
        die "BIND_ADDRESS=$bind is no address: 127.0.0.1 for this machine only, 0.0.0.0 for the network, IPv6 as in [::1]"
    if [ "$bind" != 0.0.0.0 ] && [ "$bind" != '[::]' ] && command -v ip >/dev/null; then
        bare=${bind#[}
        [[ $(ip -o addr show) == *" ${bare%]}/"* ]] || die "BIND_ADDRESS=$bind is none of this machine's addresses: hostname -I lists them"
    fi
    check_number JUPYTER_PORT 8888 65535
    check_number SSH_PORT 2222 65535
    find_set_ports
    [ -z "$ssh_set" ] || [ "$jupyter_set" != "$ssh_set" ] || die "JUPYTER_PORT and SSH_PORT are the same port"
    case $(setting PROTECT_CHECKOUT true) in
        true | false) ;;
        *) die "PROTECT_CHECKOUT=$(setting PROTECT_CHECKOUT): it is true or false" ;;
    esac
    check_number MIN_FREE_MB 500 100000000
    check_limits
    case $(setting STATION_EXPORTER on) in
        on | off) ;;
        *) die "STATION_EXPORTER=$(setting STATION_EXPORTER): it is on or off" ;;
    esac
    if wants_monitoring; then check_monitoring; fi
    check_cluster

    data=$(expand "$(setting DATASETS_DIR ./datasets)")
    check_folder DATASETS_DIR "$data"
    check_place DATASETS_DIR "$data"
    [ -d "$data" ] || die "DATASETS_DIR=$data is no folder: make it, or name the one with your data in .env"
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    if [ -n "$key" ]; then
        check_place SSH_PUBLIC_KEY "$key"
        [ -r "$key" ] && [ -f "$key" ] || die "SSH_PUBLIC_KEY=$key cannot be read"
        ! grep -q 'PRIVATE KEY' "$key" || die "SSH_PUBLIC_KEY=$key is a private key: name the file that ends in .pub"
        [ -n "$(public_keys <"$key")" ] || die "SSH_PUBLIC_KEY=$key holds no public key"
    fi
    if [ -n "$(setting CA_BUNDLE)" ]; then
        check_place CA_BUNDLE "$(setting CA_BUNDLE)"
        grep -qs 'BEGIN CERTIFICATE' "$(setting CA_BUNDLE)" || die "CA_BUNDLE=$(setting CA_BUNDLE) holds no certificate (PEM)"
    fi
    # Build arguments stay readable in the image's history.
    index=$(setting PIP_INDEX_URL)
    [[ ! $index =~ ://[^/]*@ ]] || die "PIP_INDEX_URL holds a password, which the image's history would show: use an index without one"
    check_runs
}
check_runs() {
    local runs free
    runs=$(expand "$(setting RUNS_DIR ./runs)")
    check_folder RUNS_DIR "$runs"
    check_place RUNS_DIR "$runs"
    if [ -e "$runs" ]; then
        [ -d "$runs" ] || die "RUNS_DIR=$runs is no folder"
        if [ ! -w "$runs" ]; then
            [ "$(owner_of "$runs")" != "$(id -u)" ] && [ "$(id -u)" != 0 ] || die "$runs is read-only: name another folder in RUNS_DIR, or mount it writable"
            die "$runs is not writable for you: sudo chown -R $(id -u):$(id -g) $runs"
        fi
    else
        [ -w "$(dirname "$runs")" ] || die "$(dirname "$runs") is not writable: $runs cannot be made there"
        runs=$(dirname "$runs")
    fi
    free=$(disk_free "$runs")
    [ "$free" -ge "$(setting MIN_FREE_MB 500)" ] ||
        die "the disk with $runs has $free MB left, less than MIN_FREE_MB=$(setting MIN_FREE_MB 500): free some or lower it"
    [ "$(disk_free .)" -gt 0 ] || die "the disk with $PWD is full: free some"
}
disk_free() { df -Pm "$1" | awk 'NR == 2 {print $4}'; }
# Megabytes left where the engine keeps images; nothing where that is another machine.
engine_disk_free() {
    local folder
    folder=$(docker info -f '{{.DockerRootDir}}' 2>/dev/null)
    [ ! -d "$folder" ] || disk_free "$folder"
}
# Before a first build: it takes 6 GB for the image, as much while its layers are made, and the base.
check_engine_disk() {
    local free
    [ -z "$(docker image ls --quiet trainstation)" ] || return 0
    free=$(engine_disk_free)
    [ -z "$free" ] || [ "$free" -ge 9000 ] || die "the engine's disk has $free MB left, and building the image takes 9000: docker system df shows what may go"
}

# Succeeds where a container gets NVIDIA devices from this engine; else prints why not. It is the engine that counts,
# not the machine: a GPU without NVIDIA's container toolkit is of no use in here. An empty image is enough to ask: with
# devices at hand the engine comes as far as not finding the command.
engine_gives_gpus() {
    local answer
    probe_image
    answer=$(docker run --rm --network none --gpus all trainstation-probe /nothing 2>&1) && return
    case $answer in
        *'/nothing'*) return 0 ;;
        *'could not select device driver'* | *'GPU vendor'*)
            if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
                echo "the engine cannot use this machine's GPU: install NVIDIA's container toolkit and restart the engine"
            else
                echo "the engine has no NVIDIA devices to hand out"
            fi
            ;;
        *) echo "the engine failed to hand out the GPUs: $(head -n 1 <<<"$answer" | tail -c 300)" ;;
    esac
    return 1
}
