# The training station. Two targets: `runtime` is everything a run needs; `cuda` adds the CUDA 12.1 compiler.
# `make up` builds the right one; by hand: docker build --target runtime -t trainstation:runtime .
#
# It builds with BuildKit as old as Docker Engine 20.10's: no syntax line, which would be fetched from a registry.

# Both by digest: what is built later comes from the same images. BASE_IMAGE and CUDA_IMAGE can name a mirror's copies.
# Debian 12.15. scripts/station-image.sh and compose read the defaults here.
ARG BASE_IMAGE=debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG CUDA_IMAGE=nvidia/cuda:12.1.1-devel-ubuntu22.04@sha256:7012e535a47883527d402da998384c30b936140c05e2537158c80b8143ee7425


# --- the toolkit, cut down to what compiling takes (only built for the target cuda) ---------------------------------
FROM ${CUDA_IMAGE} AS toolkit
# PyTorch brings the libraries of CUDA; of the toolkit only the compiler, its headers, and what it links by default
# are wanted. That leaves out 4 GB of static and math libraries.
WORKDIR /usr/local/cuda-12.1
RUN set -eu; mkdir -p /toolkit/lib64; \
    cp -aL bin include nvvm /toolkit/; \
    for file in lib64/libcudart* lib64/libcudadevrt.a lib64/libnvrtc* lib64/stubs; do \
        if [ -e "$file" ]; then cp -aL "$file" /toolkit/lib64/; fi; \
    done


# --- Debian's packages ----------------------------------------------------------------------------------------------
# checkov:skip=CKV_DOCKER_7: the tag is in the default of BASE_IMAGE, above
FROM ${BASE_IMAGE} AS system

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG APT_MIRROR=
ARG EXTRA_APT=
# What a person works with (editors, tmux, git, rsync, htop) and what an operator types beside what the services need.
# gcc and Python's headers are for Triton, which compiles its launchers at run time, and for extensions; gcc 12.2 is the
# newest CUDA 12.1 takes.
# The lists and archives stay in cache mounts. Host keys that sshd's package makes must not be in a layer: every
# station would share them.
# Versions are Debian's to decide: one stable release, with its security fixes, of today or of the day in APT_MIRROR; what
# the base image has older is upgraded.
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    --mount=type=secret,id=ca_bundle \
    --mount=type=bind,source=docker/debian-sources.sh,target=/run/debian-sources.sh \
    rm -f /etc/apt/apt.conf.d/docker-clean; \
    if [ -n "${APT_MIRROR}" ]; then \
        /run/debian-sources.sh "${APT_MIRROR}" >/etc/apt/sources.list.d/debian.sources; \
    fi; \
    if [ -s /run/secrets/ca_bundle ]; then \
        echo 'Acquire::https::CAInfo "/run/secrets/ca_bundle";' >/etc/apt/apt.conf.d/ca_bundle; \
    fi; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get upgrade -y --no-install-recommends; \
    # shellcheck disable=SC2086 # EXTRA_APT is a list
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bash-completion ca-certificates curl g++ gcc git htop iproute2 iputils-ping less libc6-dev lsof make nano \
        openssh-client openssh-server procps python3 python3-dev python3-pip rsync supervisor tini tmux unzip vim-tiny \
        wget ${EXTRA_APT}; \
    update-alternatives --quiet --install /usr/bin/vim vim /usr/bin/vim.tiny 10; \
    rm -f /etc/ssh/ssh_host_* /etc/apt/apt.conf.d/ca_bundle; \
    # This Python belongs to the image: pip may install into a user's own folder.
    rm -f /usr/lib/python3*/EXTERNALLY-MANAGED; \
    ln -s python3 /usr/bin/python; \
    # A viewer for link-time optimised objects and a static Python, 60 MB that nothing here links.
    rm -f /usr/bin/*-lto-dump-* /usr/lib/python3.11/config-*/libpython3.11*.a


# --- Python packages: a layer of its own, made anew only when the lock changes --------------------------------------
FROM system AS runtime

ARG PIP_INDEX_URL=
WORKDIR /opt/trainstation
COPY requirements.lock docker/slim.sh ./
# uv itself comes by the lock's hash too. Byte code is compiled now: the user who runs it cannot write beside it, and
# would compile it at each start. pip's cache is a mount, and no part of the image.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache \
    --mount=type=secret,id=ca_bundle \
    if [ -s /run/secrets/ca_bundle ]; then \
        export SSL_CERT_FILE=/run/secrets/ca_bundle PIP_CERT=/run/secrets/ca_bundle; \
    fi; \
    if [ -n "${PIP_INDEX_URL}" ]; then \
        printf '[global]\nindex-url = %s\n' "${PIP_INDEX_URL}" >/etc/pip.conf; \
        export UV_DEFAULT_INDEX="${PIP_INDEX_URL}"; \
    fi; \
    awk '/^uv==/ {found = 1} found {print} found && !/\\$/ {exit}' requirements.lock >/tmp/uv.lock; \
    python3 -m pip install --no-compile --quiet --root-user-action=ignore --require-hashes -r /tmp/uv.lock; \
    UV_LINK_MODE=copy uv pip install --system --require-hashes --no-deps --compile-bytecode -r requirements.lock; \
    rm /tmp/uv.lock; \
    ./slim.sh; \
    # What is left imports and computes.
    python3 -c 'import torch, torchvision, triton, scipy.stats, sklearn.datasets, matplotlib.pyplot; torch.ones(2) @ torch.ones(2)'

# --- the station: the account, the services' settings, the package --------------------------------------------------
RUN useradd --create-home --uid 1000 --user-group --shell /bin/bash --comment "works here" dev; \
    # A star is no password that fits; the exclamation mark useradd leaves would lock the account for keys too.
    usermod -p '*' dev; \
    mkdir -p /workspace /datasets /etc/trainstation/hostkeys /opt/trainstation/checkout; \
    # The mounted package, for Python's path (trainstation.pth).
    ln -s /workspace/train /opt/trainstation/checkout/train; \
    mkdir -m 700 /etc/trainstation/private; \
    # /etc/gitconfig lets git work in /workspace, whoever owns it; not for root, who would run dev's hooks there.
    printf '[safe]\n\tdirectory =\n' >/root/.gitconfig; \
    chown dev:dev /workspace
COPY docker/rootfs/ /
COPY entrypoint.sh /usr/local/bin/entrypoint
COPY train/ /opt/trainstation/train/
# No program gives whoever starts it another user's or group's rights, or a capability: nothing here needs that, and one
# with a capability that the container has not does not even start. (The stage before has set pipefail.)
# hadolint ignore=DL4006
RUN find / -xdev -perm /6000 -exec chmod a-s {} +; \
    getcap -r / 2>/dev/null | cut -d ' ' -f 1 | xargs --no-run-if-empty --max-args 1 setcap -r; \
    python3 -I -m compileall -q /opt/trainstation/train /usr/local/lib/trainstation \
        /usr/local/lib/python3.11/dist-packages/trainstation_folders.py

# The same variables reach every way in (docker exec, ssh, Jupyter, tmux): what is set here is there for all of them,
# see docker/rootfs/usr/local/lib/trainstation/steps/60-environment.
# PATH has only folders that root alone can write: `docker exec` is root by default. What dev installs in ~/.local/bin is
# added where dev's processes start (steps/60-environment).
# No CUDA folder is in LD_LIBRARY_PATH: it would take precedence over the libraries PyTorch was built with.
# NVIDIA_REQUIRE_CUDA: PyTorch's CUDA 12.6 libraries run on every driver of the 12 series, from 525 on.
ENV PATH=/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    TRAINSTATION_IMAGE=1 \
    TRAIN_RUNS=/workspace/runs \
    CUDA_HOME=/usr/local/cuda \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=12.1 driver>=525"

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="trainstation" \
      org.opencontainers.image.description="A GPU training station: PyTorch 2.7, CUDA 12.1, JupyterLab, ssh" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      trainstation.torch="2.7.1" \
      trainstation.torchvision="0.22.1" \
      trainstation.cuda.compiler="12.1" \
      trainstation.cuda.libraries="12.6"

# Not /workspace: root's programs that look in the current folder find nothing of dev's. as-dev goes there.
WORKDIR /
EXPOSE 8888 2222
# A start is given five minutes: where training holds every core, JupyterLab takes more than one.
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=3 CMD ["/usr/local/bin/station-health"]
# tini reaps what tmux and the services leave behind; -g is not given: a run is stopped by its keeper, not by a signal
# that reaches all its processes at once.
# Root starts the services and maps the user; sshd needs it, everything else runs as dev.
# checkov:skip=CKV_DOCKER_8: as above
# hadolint ignore=DL3002,DL3066
USER root
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/entrypoint"]


# --- with the CUDA 12.1 compiler ------------------------------------------------------------------------------------
FROM runtime AS cuda
COPY --from=toolkit /toolkit/ /usr/local/cuda/
