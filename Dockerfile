# The training station. Two targets: `runtime` is everything a run needs; `cuda` adds the CUDA 12.1 compiler.
# `make up` builds the right one; by hand: docker build --target runtime -t trainstation:runtime .
#
# The BuildKit of Docker Engine 20.10 is enough. There is no syntax line, because it would be fetched from a registry.

# Both images are named by digest, so that later builds use the same ones. BASE_IMAGE and CUDA_IMAGE can name copies
# in a mirror. The base is Debian 12.15. scripts/station-image.sh and compose read these defaults.
ARG BASE_IMAGE=debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG CUDA_IMAGE=nvidia/cuda:12.1.1-devel-ubuntu22.04@sha256:7012e535a47883527d402da998384c30b936140c05e2537158c80b8143ee7425


# --- the parts of the CUDA toolkit that compiling needs (built for the target cuda only) ----------------------------
# If the next line fails because no registry answers: make up (it builds a station without this part)
FROM ${CUDA_IMAGE} AS toolkit
# PyTorch brings CUDA's libraries. We copy only the compiler, its headers, and the libraries that it links by default.
# That leaves out 4 GB of static and math libraries.
WORKDIR /usr/local/cuda-12.1
RUN set -eu; mkdir -p /toolkit/lib64; \
    cp -aL bin include nvvm /toolkit/; \
    for file in lib64/libcudart* lib64/libcudadevrt.a lib64/libnvrtc* lib64/stubs; do \
        if [ -e "$file" ]; then cp -aL "$file" /toolkit/lib64/; fi; \
    done


# --- Debian's packages ----------------------------------------------------------------------------------------------
# checkov:skip=CKV_DOCKER_7: the tag is in the default of BASE_IMAGE, above
# If the next line fails because no registry answers: make up (it builds this image from Debian's archive)
FROM ${BASE_IMAGE} AS system

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG APT_MIRROR=
# Packages for the services, for people (editors, tmux, git, rsync, htop) and for operators. Triton compiles its
# launchers at run time with gcc and Python's headers; extensions need them too. CUDA 12.1 accepts gcc up to 12.2.
# NCCL loads libibverbs, and that loads the providers; without them NCCL uses TCP.
# apt's lists and archives stay in cache mounts. The host keys that sshd's package makes must not be in a layer, because
# every station would share them.
# Versions come from one stable release of Debian with its security fixes, of today or of the day in APT_MIRROR. Older
# packages of the base image are upgraded.
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
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bash-completion ca-certificates curl g++ gcc git htop ibverbs-providers iproute2 iputils-ping less libc6-dev \
        libibverbs1 lsof make nano openssh-client openssh-server procps python3 python3-dev python3-pip rsync \
        supervisor tini tmux unzip vim-tiny wget; \
    update-alternatives --quiet --install /usr/bin/vim vim /usr/bin/vim.tiny 10; \
    rm -f /etc/ssh/ssh_host_* /etc/apt/apt.conf.d/ca_bundle; \
    # Allow pip to install into a user's home folder.
    rm -f /usr/lib/python3*/EXTERNALLY-MANAGED; \
    ln -s python3 /usr/bin/python; \
    # Remove a viewer for link-time optimised objects and a static Python: 60 MB that nothing here uses.
    rm -f /usr/bin/*-lto-dump-* /usr/lib/python3.11/config-*/libpython3.11*.a


# --- Python packages: a separate layer, rebuilt only when the lock changes ------------------------------------------
FROM system AS runtime

ARG PIP_INDEX_URL=
WORKDIR /opt/trainstation
COPY requirements.lock docker/slim.sh ./
# uv itself is checked by the lock's hash too. pip's cache is a mount and not part of the image.
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
    UV_LINK_MODE=copy uv pip install --system --require-hashes --no-deps -r requirements.lock; \
    rm /tmp/uv.lock; \
    ./slim.sh; \
    # Check that the remaining packages import and compute.
    python3 -c 'import torch, torchvision, triton, scipy.stats, sklearn.datasets, matplotlib.pyplot; torch.ones(2) @ torch.ones(2)'

# uPlot, which draws the curves of the page.
ARG NPM_MIRROR=
RUN --mount=type=secret,id=ca_bundle \
    --mount=type=bind,source=docker/uplot.py,target=/run/uplot.py \
    if [ -s /run/secrets/ca_bundle ]; then export SSL_CERT_FILE=/run/secrets/ca_bundle; fi; \
    python3 -B /run/uplot.py

# --- what changes often comes last, so that a change costs seconds --------------------------------------------------
# More Debian packages of a person.
ARG EXTRA_APT=
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    --mount=type=secret,id=ca_bundle \
    [ -n "${EXTRA_APT}" ] || exit 0; \
    if [ -s /run/secrets/ca_bundle ]; then \
        echo 'Acquire::https::CAInfo "/run/secrets/ca_bundle";' >/etc/apt/apt.conf.d/ca_bundle; \
    fi; \
    apt-get update; \
    # shellcheck disable=SC2086 # EXTRA_APT is a list
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ${EXTRA_APT}; \
    rm -f /etc/ssh/ssh_host_* /etc/apt/apt.conf.d/ca_bundle

# The station: the account, the services' settings, the package.
RUN useradd --create-home --uid 1000 --user-group --shell /bin/bash --comment "works here" dev; \
    # No password matches a star. The exclamation mark that useradd leaves would lock the account for keys too.
    usermod -p '*' dev; \
    mkdir -p /workspace /datasets /etc/trainstation/hostkeys /opt/trainstation/checkout; \
    # trainstation.pth puts these links to the mounted package on Python's path.
    ln -s /workspace/train /workspace/trainstation /opt/trainstation/checkout/; \
    mkdir -m 700 /etc/trainstation/private; \
    # /etc/gitconfig lets git work in /workspace, whoever owns it. Root is excluded: it would run dev's hooks there.
    printf '[safe]\n\tdirectory =\n' >/root/.gitconfig; \
    chown dev:dev /workspace
COPY docker/rootfs/ /
COPY entrypoint.sh /usr/local/bin/entrypoint
COPY train/ /opt/trainstation/train/
COPY trainstation/ /opt/trainstation/trainstation/
# No program may give its caller the rights of another user or group, or a capability. Nothing here needs that, and a
# program with a capability that the container lacks does not even start. (The stage above has set pipefail.)
# hadolint ignore=DL4006
RUN find / -xdev -perm /6000 -exec chmod a-s {} +; \
    getcap -r / 2>/dev/null | cut -d ' ' -f 1 | xargs --no-run-if-empty --max-args 1 setcap -r; \
    for name in apt apt-get conda mamba micromamba sudo; do \
        ln -s ../lib/trainstation/not-here "/usr/local/bin/$name"; \
    done; \
    python3 -I -m compileall -q /opt/trainstation/train /usr/local/lib/trainstation \
        /usr/local/lib/python3.11/dist-packages/trainstation_folders.py

# These variables reach every way in (docker exec, ssh, Jupyter, tmux), by
# docker/rootfs/usr/local/lib/trainstation/steps/60-environment.
# PATH has only folders that only root can write, because `docker exec` is root by default. The same step adds
# ~/.local/bin to the PATH of dev's processes.
# LD_LIBRARY_PATH has no CUDA folder: it would come before the libraries that PyTorch was built with.
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
ENV TRAINSTATION_VERSION="${VERSION} (${REVISION})"
LABEL org.opencontainers.image.title="trainstation" \
      org.opencontainers.image.description="A GPU training station: PyTorch 2.7, CUDA 12.1, JupyterLab, ssh" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      trainstation.torch="2.7.1" \
      trainstation.torchvision="0.22.1" \
      trainstation.cuda.compiler="12.1" \
      trainstation.cuda.libraries="12.6"

# Not /workspace, so that root's programs find no file of dev in the current folder. as-dev changes to /workspace.
WORKDIR /
EXPOSE 8888 2222
# Allow five minutes for a start: JupyterLab needs more than one while training uses every core.
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=3 CMD ["/usr/local/bin/station-health"]
# tini collects processes that tmux and the services leave behind. It gets no -g, because the keeper stops the runs,
# and a signal to all their processes at once would not save them. Root starts the services and sets dev's user
# number. sshd needs root; everything else runs as dev.
# checkov:skip=CKV_DOCKER_8: as above
# hadolint ignore=DL3002,DL3066
USER root
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/entrypoint"]


# --- with the CUDA 12.1 compiler ------------------------------------------------------------------------------------
FROM runtime AS cuda
COPY --from=toolkit /toolkit/ /usr/local/cuda/
