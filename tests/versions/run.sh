#!/usr/bin/env bash
# All tests, with several versions of Python, and with the oldest releases of the dependencies that
# pyproject.toml admits. Prints a table last.
#
#   tests/versions/run.sh [NAME …]    # of those below; by default all of them
#
# A run needs these versions of Python, in the PATH or in ~/.pyenv, and takes 9 to 15 minutes for each.
# FOLDER (/tmp/nanoengine-versions) gets the environments, of up to 6 GB each, and the logs. An
# environment that is there is used again.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=${FOLDER:-/tmp/nanoengine-versions}
mkdir -p "$folder"

# the oldest releases: each requirement with a lower bound gets this release
oldest() {
    "$(find_python 3.11)" -c '
import itertools, re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
needed = itertools.chain(project["dependencies"], extras["test"], extras["ray"])
bounds = [re.match(r"([\w-]+(?:\[\w+\])?)>=([\d.]+)", each) for each in needed]
print(*["==".join(bound.groups()) for bound in bounds if bound])'
}

find_python() {  # of a version: made by pyenv, or in the PATH
    ls -d "$HOME/.pyenv/versions/$1".*/bin/python3 2> /dev/null | sort -V | tail -n 1 | grep . ||
        command -v "python$1"
}

names=("$@")
[ $# = 0 ] && names=(3.10 3.11 3.12 3.13 oldest)
declare -A python=([3.10]=3.10 [3.11]=3.11 [3.12]=3.12 [3.13]=3.13 [oldest]=3.11)
declare -A packages=()
[[ " ${names[*]} " = *" oldest "* ]] && packages[oldest]=$(oldest)
table=()
for name in "${names[@]}"; do
    bin=$folder/$name/bin
    if [ ! -e "$bin/pytest" ]; then
        "$(find_python "${python[$name]}")" -m venv "$folder/$name" &&
            "$bin/pip" install -q ".[test,ray]" ${packages[$name]:-} ||
            { table+=("$name: no result, it was not installed"); continue; }
    fi
    began=$SECONDS
    "$bin/python" -m pytest -q -m "" -p no:cacheprovider > "$folder/$name.log" 2>&1 < /dev/null
    counts=$(tail -n 1 "$folder/$name.log" | grep -oE '[0-9]+ (passed|failed|skipped|error)' | paste -sd,)
    versions=$("$bin/python" -c '
import platform
from importlib.metadata import version
names = "torch transformers numba pydantic numpy triton".split()
print(platform.python_version(), *[f"{name} {version(name)}" for name in names], sep=", ")')
    table+=("$name: $versions: ${counts:-no result}, $(((SECONDS - began) / 60)) min")
    echo "${table[-1]}"
done
echo "-- summary ($(date -u +%F)) --"
printf '%s\n' "${table[@]}"
! printf '%s\n' "${table[@]}" | grep -qE 'failed|error|no result'
