#!/bin/bash
# Runs nanoengine on an emulated ARM (aarch64 Linux); compares its greedy tokens with the host's.
#
#     sudo PYTHON=/path/to/the/venv/bin/python tests/arm/run.sh [folder]
#
# The host is Debian or Ubuntu on x86-64; its PYTHON has what nanoengine needs, and pip. The folder,
# /tmp/nanoengine-arm if none is given, gets 1.3 GB of files, which the next run reuses. A run
# takes about ten minutes. Times on an emulated CPU say nothing about a real one.
set -euo pipefail

# Mounts are for this script alone, and end with it.
[ -v OWN_MOUNTS ] || OWN_MOUNTS=1 exec unshare --mount "$0" "$@"

code=$(realpath "$(dirname "$0")/../..")
folder=$(realpath -m "${1:-/tmp/nanoengine-arm}")
python=${PYTHON:-python3}
root=$folder/root
mkdir -p "$folder"

# --- the emulator: Linux runs every aarch64 program in it, even inside a chroot
apt-get install -y -q --no-install-recommends qemu-user-static binfmt-support debootstrap
mountpoint -q /proc/sys/fs/binfmt_misc ||
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
update-binfmts --enable qemu-aarch64

# --- Debian, whose Python is 3.11, with a libgomp for numba
if [ ! -e "$root/complete" ]; then
    rm -rf "$root"
    debootstrap --arch=arm64 --variant=minbase --include=python3,libgomp1 bookworm "$root"
    touch "$root/complete"
fi

# --- wheels for aarch64; the host's pip unpacks them, as an emulated one would be slow
platforms=(--platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64
           --platform manylinux2014_aarch64 --python-version 311 --only-binary=:all:)
if [ ! -e "$folder/site/complete" ]; then
    rm -rf "$folder/wheels" "$folder/site"
    # without torch's dependencies: its GPU libraries are larger than everything else together
    "$python" -m pip download -q -d "$folder/wheels" "${platforms[@]}" --no-deps torch==2.9.1
    "$python" -m pip download -q -d "$folder/wheels" "${platforms[@]}" \
        filelock fsspec jinja2 networkx sympy typing_extensions \
        numba llvmlite transformers safetensors tokenizers xxhash pydantic psutil tqdm numpy pytest
    "$python" -m pip install -q --target "$folder/site" "${platforms[@]}" --no-deps --no-compile \
        "$folder"/wheels/*.whl
    touch "$folder/site/complete"
fi

mkdir -p "$root/opt/site" "$root/opt/code"
mount --bind "$folder/site" "$root/opt/site"
mount --bind "$code" "$root/opt/code"
mount -o remount,bind,ro "$root/opt/code"
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
mountpoint -q "$root/sys" || mount --rbind /sys "$root/sys"
# QEMU before 8.2 shows the host's cpuinfo. This one is a Graviton3's, which has bfloat16.
for number in 0 1; do
    printf 'processor\t: %d\n' "$number"
    printf 'Features\t: %s\n' "fp asimd aes sha2 crc32 atomics fphp asimdhp sve i8mm svebf16 bf16"
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n'
    printf 'CPU part\t: 0xd40\nCPU revision\t: 1\n\n'
done > "$folder/cpuinfo"
mount --bind "$folder/cpuinfo" "$root/proc/cpuinfo"

on_arm() {
    timeout 1800 chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
        PYTHONPATH=/opt/code:/opt/site PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba \
        OMP_NUM_THREADS=2 NUMBA_NUM_THREADS=2 python3 "$@"
}

on_arm -c "
import platform, nanoengine_extras.cpu
assert platform.machine() == 'aarch64' and nanoengine_extras.cpu.has_bfloat16()
print('an', platform.machine(), 'with bfloat16')"

# --- the libgomp that torch and numba share, and the kernels of matrix products: of small ones,
# as large ones take minutes, and not those that are compiled for CPUs with x86
on_arm -m pytest -q -c /opt/code/pyproject.toml --rootdir /opt/code -o addopts= \
    -p no:cacheprovider \
    -k "not (huge_pages or other_cpus or long_rows or 16384 or 1008 or 1024)" \
    /opt/code/tests/cpu/test_cpu_memory.py /opt/code/tests/cpu/test_products.py

# --- the same greedy tokens as on the host
PYTHONPATH=$code "$python" "$code/tests/arm/tokens.py" > "$folder/tokens.host"
on_arm /opt/code/tests/arm/tokens.py > "$folder/tokens.arm"
cmp "$folder/tokens.host" "$folder/tokens.arm"
echo "$(wc -l < "$folder/tokens.arm") ways to compute, the same tokens as on the host"
