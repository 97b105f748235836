# shellcheck shell=bash disable=SC2154,SC2034 # mode, image: from other parts of station.sh
# Checks before the station starts. Each says in one line what is wrong and what to do. Sourced by station.sh, which
# runs them before it creates or changes anything.

check_engine() {
    local answer version
    answer=$(docker version --format '{{.Server.Version}}' 2>&1) || case $answer in
        *'permission denied'*) die "you may not use the Docker engine: sudo usermod -aG docker $(id -un 2>/dev/null || id -u), then log in again" ;;
        *) die "no Docker engine answers. make engine installs and starts one (Debian, Ubuntu, as root); make demo trains without one" ;;
    esac
    version=$(docker compose version --short 2>/dev/null) || version=none
    case ${version#v} in
        none | 1.* | 2.[0-9].* | 2.1[0-9].* | 2.2[0-3].*) die "docker compose 2.24 or newer is needed, found $version: make engine installs it, as root" ;;
    esac
}

# In an engine that maps users, no user inside can write to the checkout.
check_users() {
    local number
    engine_options=$(docker info -f '{{.SecurityOptions}}' 2>/dev/null)
    [[ $engine_options != *name=userns* ]] ||
        die "this engine maps users (userns-remap), so no user inside could write to this checkout: use an engine without it, or a rootless one"
    # In a checkout owned by root, dev must have a number that no user of this machine has. Such a user could read the
    # token and write to the runs.
    if [ "$(owner_of .)" = 0 ] && [ -z "$(setting DEV_UID)" ]; then
        number=$(sed -n 's/^unknown_user=//p' docker/rootfs/usr/local/lib/trainstation/steps/10-validate)
        ! { getent passwd "$number" || getent group "$number"; } >/dev/null 2>&1 ||
            die "this checkout belongs to root, and its user inside, $number, also exists on this machine: set DEV_UID and DEV_GID in .env to a number that does not"
        say "this checkout belongs to root: inside, dev is user $number, which this machine does not know"
    fi
}

# Before Docker 28, machines of the same network get past BIND_ADDRESS (scripts/firewall.sh). A restart of the engine by
# hand, or a reload of the firewall, may have removed the rule.
check_neighbours() {
    local engine
    engine=$(docker info -f '{{.ServerVersion}} {{.OperatingSystem}}')
    [ "$(uname -s)" = Linux ] && [ "${engine%%.*}" -lt 28 ] && [[ $engine$engine_options != *'Docker Desktop'* && $engine_options != *name=rootless* ]] || return 0
    if [ "$(id -u)" = 0 ]; then
        scripts/firewall.sh check || scripts/firewall.sh set 2>&1 || say "warning: machines of the same network can reach the station, whatever BIND_ADDRESS says (docs/security.md)"
    elif [ ! -e /run/trainstation-firewall ]; then
        say "warning: machines of the same network can reach the station, whatever BIND_ADDRESS says: sudo make engine sets a firewall rule"
    fi
}

# Succeed if this machine has cards for InfiniBand or RoCE whose device files a container can get.
has_rdma() { compgen -G '/dev/infiniband/uverbs*' >/dev/null; }

# Print the compose files in COMPOSE_FILE besides the station's. One that dev can write to would be dev's way out.
more_files() {
    local IFS=: file
    for file in $(setting COMPOSE_FILE); do
        case ${file#./} in '' | docker-compose.yml | docker-compose.cpu.yml | docker-compose.rdma.yml | docker-compose.cluster.yml) ;; *) printf '%s\n' "$file" ;; esac
    done
}
check_compose_files() {
    local file
    while IFS= read -r file; do
        [ -f "$file" ] || die "COMPOSE_FILE names $file, which does not exist: correct that line in .env"
        check_place COMPOSE_FILE "$file"
    done < <(more_files)
    config=$(compose config --format json station 2>&1) || die "docker compose cannot read the settings: $(tail -n 1 <<<"$config")"
}
# Limit shared memory to half of the machine's memory, because it is not given back under pressure.
check_shared_memory() {
    local memory limit
    memory=$(docker info -f '{{.MemTotal}}') limit=$(bytes_of mem_limit)
    [ "${limit:-0}" = 0 ] || [ "$limit" -ge 1073741824 ] || die "MEMORY=$(setting MEMORY): it must be 1g or more"
    [ "${limit:-0}" = 0 ] || [ "$limit" -gt "$memory" ] || memory=$limit
    [ "$(bytes_of shm_size)" -gt $((memory / 2)) ] || return 0
    lower SHM_SIZE $((memory / 2097152))m "is more than half of the memory ($((memory / 1048576)) MB)"
}
# Limit the processes of the station to half of what the kernel allows, so that the machine keeps some.
check_processes() {
    local most limit
    most=$(cat /proc/sys/kernel/pid_max /proc/sys/kernel/threads-max 2>/dev/null | sort -n | head -n 1)
    limit=${PIDS_LIMIT:-32768}
    [ -n "$most" ] && [ "$limit" -gt $((most / 2)) ] || return 0
    lower PIDS_LIMIT $((most / 2)) "is more than half of the processes that this machine can have ($most)"
}
bytes_of() { sed -nE "s/^ *\"$1\": \"([0-9]+)\",?$/\1/p" <<<"$config"; } # a setting of the station, as compose reads it

# check_place NAME PATH: refuse a path in a folder that is writable inside. dev could replace it by a link to
# anywhere, and the engine follows that link at each start, also without make. docker-compose.yml lists these folders.
check_place() {
    local folder here place runs
    here=$(cd -P . && printf '%s' "$PWD")
    place=$(cd -P -- "$(dirname -- "$2")" 2>/dev/null && printf '%s/%s' "$PWD" "$(basename -- "$2")") || return 0
    runs=$(cd -P -- "$(expand "$(setting RUNS_DIR ./runs)")" 2>/dev/null && printf '%s' "$PWD") || runs=$here/runs
    [ -z "$(setting RUNS_DIR)" ] || [[ $here/ != "${runs%/}"/* ]] || die "RUNS_DIR=$(setting RUNS_DIR) holds this checkout, so user dev inside could change all of it: name another folder"
    for folder in "$here"/{train,tests,notebooks,projects,docs,runs,datasets} "$runs"; do # runs may be kept elsewhere
        [[ $place != "$folder"/* ]] || die "$1=$2 lies in ${folder#"$here"/}/, where user dev inside can put anything in its place: move it out of there"
    done
}

# check_folder NAME FOLDER: refuse a link inside the checkout. Without PROTECT_CHECKOUT dev could replace a folder, for
# example ./runs, by a link to the host's root.
check_folder() {
    local path=$2
    while [[ $path == *//* ]]; do path=${path//\/\//\/}; done
    path=${path%/} path=${path#"$PWD"/}
    while [[ $path != /* && $path != . ]]; do
        [ ! -L "$path" ] || die "$path is a link to $(readlink "$path"): if you want that folder, name it itself as $1 in .env"
        path=$(dirname -- "$path")
    done
}

check_form() { # NAME DEFAULT PATTERN WHAT
    [[ $(setting "$1" "$2") =~ ^($3)$ ]] || die "$1=$(setting "$1" "$2"): it is $4"
}
check_settings() {
    local bind key data leases runs cores network free left name
    left=$(grep -m 1 'REPLACE_WITH_' <<<"$settings" | sed -E 's/^ *"(.*)": "(.*)",?$/\1=\2/') || :
    [ -z "$left" ] || die "$left in .env is a placeholder: replace it, or remove that line"
    check_form GPUS all 'all|none|[1-9][0-9]*|([0-9]+,)+[0-9]*' "all, none, a count such as 2, or ids such as 0,1 (a single id: 2,)"
    bind=$(setting BIND_ADDRESS 127.0.0.1)
    if [ "$bind" != 0.0.0.0 ] && [ "$bind" != '[::]' ] && command -v ip >/dev/null; then
        [[ " $(ip -o addr show | awk '{ sub("/.*", "", $4); print ($3 == "inet6") ? "[" $4 "]" : $4 }' | tr '\n' ' ')" == *" $bind "* ]] ||
            die "BIND_ADDRESS=$bind is no address of this machine: use 127.0.0.1 for this machine only, 0.0.0.0 for the network, or IPv6 as in [::1]"
    fi
    [ "$(setting JUPYTER_PORT 8888)" != "$(setting SSH_PORT 2222)" ] || die "JUPYTER_PORT and SSH_PORT are the same port: change one in .env"
    check_form PROTECT_CHECKOUT true 'true|false' "true or false"
    check_form STATION_LANDING page 'page|lab' "page or lab"
    check_form STATION_LANG en 'en|zh_CN' "en or zh_CN"
    check_form STATION_EXPORTER on 'on|off' "on or off"
    ! wants_monitoring || [ "$(setting STATION_EXPORTER on)" = on ] ||
        die "COMPOSE_PROFILES=monitoring with STATION_EXPORTER=off would show nothing: remove one of the two"
    check_form MIN_FREE_MB 500 '[1-9][0-9]{0,8}' "a number of megabytes"
    check_form KERNEL_IDLE_HOURS 24 '[0-9]{1,4}' "a number of hours; 0: kernels never end by themselves"
    check_form PIDS_LIMIT 32768 '[5-9][0-9]{2}|[1-9][0-9]{3,6}' "a number from 500 on"
    check_form CPUS 0 '[0-9]{1,4}([.][0-9]{1,2})?' "a number of processors, such as 1.5"
    cores=$(docker info -f '{{.NCPU}}')
    [ "$(setting CPUS 0 | cut -d. -f1)" -le "$cores" ] || die "CPUS=$(setting CPUS): this machine has $cores"
    network=$(setting CLUSTER_NETWORK)
    [ -n "$network" ] || [ -z "$(setting CLUSTER_ADDRESS)" ] ||
        die "CLUSTER_ADDRESS without a network: set CLUSTER_NETWORK to the network of that address (docs/clusters.md)"
    [ -z "$network" ] || docker network inspect -- "$network" >/dev/null 2>&1 ||
        die "CLUSTER_NETWORK=$network is no network of this engine: docker network ls lists them, docs/clusters.md says how to make one"

    data=$(expand "$(setting DATASETS_DIR ./datasets)")
    check_folder DATASETS_DIR "$data"
    check_place DATASETS_DIR "$data"
    [ -d "$data" ] || die "DATASETS_DIR=$data is no folder: create it, or name the folder with your data in .env"
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    if [ -n "$key" ]; then
        check_place SSH_PUBLIC_KEY "$key"
        [ -n "$(public_keys 2>/dev/null <"$key")" ] || die "SSH_PUBLIC_KEY=$key cannot be read, or holds no public key: name the file that ends in .pub"
    fi
    if [ -n "$(setting CA_BUNDLE)" ]; then
        check_place CA_BUNDLE "$(setting CA_BUNDLE)"
        grep -qs 'BEGIN CERTIFICATE' "$(setting CA_BUNDLE)" || die "CA_BUNDLE=$(setting CA_BUNDLE) holds no certificate (PEM)"
    fi
    # Build arguments can be read in the image's history.
    for name in PIP_INDEX_URL NPM_MIRROR; do
        [[ ! $(setting "$name") =~ ://[^/]*@ ]] || die "$name holds a password, which the image's history would show: use an index without a password"
    done
    [[ $(setting NPM_MIRROR https://x) =~ ^https?:// ]] || die "NPM_MIRROR=$(setting NPM_MIRROR) is no address: it begins with http:// or https://"
    runs=$(expand "$(setting RUNS_DIR ./runs)")
    check_folder RUNS_DIR "$runs"
    check_place RUNS_DIR "$runs"
    leases=$(expand "$(setting LEASES_DIR)")
    if [[ $leases == */* ]]; then # otherwise a volume
        check_folder LEASES_DIR "$leases"
        check_place LEASES_DIR "$leases"
    fi
    [ ! -e "$runs" ] || [ -d "$runs" ] || die "RUNS_DIR=$runs is no folder: name a folder in .env"
    [ -e "$runs" ] || runs=$(dirname "$runs")
    [ -w "$runs" ] || die "you cannot write to $runs: name another folder as RUNS_DIR in .env, or sudo chown -R $(id -u):$(id -g) $runs"
    free=$(disk_free "$runs")
    [ "$free" -ge "$(setting MIN_FREE_MB 500)" ] ||
        die "the disk with $runs has $free MB left, less than MIN_FREE_MB=$(setting MIN_FREE_MB 500): free some space, or lower MIN_FREE_MB"
}
# Before a first build: check the space for the image (6 GB) and for the packages that the build keeps in its cache (6 GB).
check_engine_disk() {
    local folder
    folder=$(docker info -f '{{.DockerRootDir}}' 2>/dev/null)
    [ -z "$(docker image ls --quiet trainstation)" ] && [ -d "$folder" ] || return 0 # an engine elsewhere
    [ "$(disk_free "$folder")" -ge 12500 ] || die "the engine's disk has $(disk_free "$folder") MB left, and building the image needs 12500 (make clean-cache frees half of that afterwards): docker system df shows what uses space"
}
disk_free() { df -Pm "$1" | awk 'NR == 2 {print $4}'; }
# Succeed if a container gets NVIDIA devices from this engine. Otherwise print why not. We ask the engine, not the
# machine, because the station cannot use a GPU without NVIDIA's container toolkit. An empty image is enough: with
# devices the engine fails only when it does not find the command.
engine_gives_gpus() {
    local answer
    docker image inspect trainstation-probe >/dev/null 2>&1 || tar -cf - -T /dev/null | docker import - trainstation-probe >/dev/null
    answer=$(docker run --rm --network none --gpus all trainstation-probe /nothing 2>&1) && return
    case $answer in
        *'/nothing'*) return 0 ;;
        *'could not select device driver'* | *'GPU vendor'*)
            if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
                echo "the engine cannot use this machine's GPU: install NVIDIA's container toolkit (make engine does, with NVIDIA_TOOLKIT_MIRROR in .env) and restart the engine"
            else
                echo "the engine has no NVIDIA devices"
            fi
            ;;
        *) echo "the engine failed to give a container the GPUs: $(head -n 1 <<<"$answer" | tail -c 300)" ;;
    esac
    return 1
}

# If systemd manages the control groups, its daemon-reload rewrites their device rules, and it knows GPUs only by
# links in /dev/char. Naming device nodes to the engine does not help (NVIDIA/nvidia-container-toolkit#48).
keep_gpus() {
    local links="nvidia-ctk system create-dev-char-symlinks --create-all"
    [ "$(docker info -f '{{.CgroupDriver}}')" = systemd ] || return 0
    ! grep -q nvidia <<<"$(readlink /dev/char/* 2>/dev/null)" || return 0
    if [ "$(id -u)" = 0 ] && $links >/dev/null 2>&1; then
        say "GPUs: linked in /dev/char, so that the station keeps them after a systemctl daemon-reload; run make up again after a boot"
    else
        say "warning: a systemctl daemon-reload on this machine takes the GPUs from a running station. Until the next boot, prevent it with: sudo $links. Permanently: {\"exec-opts\": [\"native.cgroupdriver=cgroupfs\"]} in /etc/docker/daemon.json, then restart the engine"
    fi
}
