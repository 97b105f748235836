# shellcheck shell=bash
# What can be wrong before the station starts, each in one line that says what to do. Sourced by station.sh, which
# runs these before it makes or changes anything.

owner_of() { stat -c %u "$1" 2>/dev/null || stat -f %u "$1"; } # GNU, or BSD and macOS
group_of() { stat -c %g "$1" 2>/dev/null || stat -f %g "$1"; }
# A path as a person writes it in .env; the shell never saw its tilde.
expand() { printf '%s' "${1/#\~\//$HOME/}"; }

check_engine() {
    local answer
    command -v docker >/dev/null ||
        die "no Docker here. make engine installs and starts it (Debian, Ubuntu, as root); make demo trains without one"
    answer=$(docker version --format '{{.Server.Version}}' 2>&1) && return
    case $answer in
        *'permission denied'*) die "you may not use the Docker engine: sudo usermod -aG docker $(id -un), then log in again" ;;
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

check_number() { # NAME DEFAULT MOST
    local value
    value=$(setting "$1" "$2")
    [[ $value =~ ^[1-9][0-9]{0,8}$ ]] && [ "$value" -le "$3" ] || die "$1=$value: it is a number from 1 to $3"
}

check_settings() {
    local gpus bind bare key data runs free index octet
    gpus=$(setting GPUS)
    case $gpus in
        '' | all | none) ;;
        *[!0-9,]* | ,* | *,,* | 0*[!,]) [[ $gpus =~ ^0(,[0-9]+)+,?$ ]] ||
            die "GPUS=$gpus: it is all, none, a count such as 2, or ids such as 0,1 (a single id: 2,)" ;;
        0) die "GPUS=0: for no GPU say GPUS=none; for the one with id 0 say GPUS=0, (with the comma)" ;;
    esac

    bind=$(setting BIND_ADDRESS 127.0.0.1)
    if [[ $bind =~ ^([0-9]+)\.([0-9]+)\.([0-9]+)\.([0-9]+)$ ]]; then
        for octet in "${BASH_REMATCH[@]:1}"; do
            [ "$octet" -le 255 ] || die "BIND_ADDRESS=$bind is no address: 127.0.0.1 for this machine only, 0.0.0.0 for the network"
        done
    else
        [[ $bind =~ ^\[[0-9a-fA-F:]+\]$ ]] ||
            die "BIND_ADDRESS=$bind is no address: 127.0.0.1 for this machine only, 0.0.0.0 for the network, IPv6 as in [::1]"
    fi
    if [ "$bind" != 0.0.0.0 ] && [ "$bind" != '[::]' ] && command -v ip >/dev/null; then
        bare=${bind#[}
        [[ $(ip -o addr show) == *" ${bare%]}/"* ]] || die "BIND_ADDRESS=$bind is none of this machine's addresses: hostname -I lists them"
    fi
    check_number JUPYTER_PORT 8888 65535
    check_number SSH_PORT 2222 65535
    [ "$(setting JUPYTER_PORT 8888)" != "$(setting SSH_PORT 2222)" ] || die "JUPYTER_PORT and SSH_PORT are the same port"
    check_number MIN_FREE_MB 500 100000000

    data=$(expand "$(setting DATASETS_DIR ./datasets)")
    [ -d "$data" ] || die "DATASETS_DIR=$data is no folder: make it, or name the one with your data in .env"
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    if [ -n "$key" ]; then
        [ -r "$key" ] && [ -f "$key" ] || die "SSH_PUBLIC_KEY=$key cannot be read"
        ! grep -q 'PRIVATE KEY' "$key" || die "SSH_PUBLIC_KEY=$key is a private key: name the file that ends in .pub"
        ssh-keygen -l -f "$key" >/dev/null 2>&1 || die "SSH_PUBLIC_KEY=$key holds no public key"
    fi
    if [ -n "$(setting CA_BUNDLE)" ]; then
        grep -qs 'BEGIN CERTIFICATE' "$(setting CA_BUNDLE)" || die "CA_BUNDLE=$(setting CA_BUNDLE) holds no certificate (PEM)"
    fi
    # Build arguments stay readable in the image's history.
    index=$(setting PIP_INDEX_URL)
    [[ ! $index =~ ://[^/]*@ ]] || die "PIP_INDEX_URL holds a password, which the image's history would show: use an index without one"

    runs=$(expand "$(setting RUNS_DIR ./runs)")
    if [ -e "$runs" ]; then
        [ -d "$runs" ] || die "RUNS_DIR=$runs is no folder"
        [ -w "$runs" ] || die "$runs is not writable for you: sudo chown -R $(id -u):$(id -g) $runs"
    else
        [ -w "$(dirname "$runs")" ] || die "$(dirname "$runs") is not writable: $runs cannot be made there"
        runs=$(dirname "$runs")
    fi
    free=$(df -Pm "$runs" | awk 'NR == 2 {print $4}')
    [ "$free" -ge "$(setting MIN_FREE_MB 500)" ] ||
        die "the disk with $runs has $free MB left, less than MIN_FREE_MB=$(setting MIN_FREE_MB 500): free some or lower it"
}

# Only when the station is not there yet: a port that it holds itself is no obstacle.
check_ports() {
    local name port host
    host=$(address)
    host=${host#[}
    host=${host%]}
    for name in JUPYTER_PORT:8888 SSH_PORT:2222; do
        port=$(setting "${name%:*}" "${name#*:}")
        if (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; then
            die "port $port is taken on $host: stop what holds it, or set ${name%:*} in .env to a free one"
        fi
    done
}

have_image() { docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" >/dev/null 2>&1; }

# Succeeds where a container gets NVIDIA devices from this engine; else prints why not. It is the engine that counts,
# not the machine: a GPU without NVIDIA's container toolkit is of no use in here. An empty image is enough to ask: with
# devices at hand the engine comes as far as not finding the command.
engine_gives_gpus() {
    local answer
    docker image inspect trainstation-probe >/dev/null 2>&1 || tar -cf - -T /dev/null | docker import - trainstation-probe >/dev/null
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
