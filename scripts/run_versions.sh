#!/usr/bin/env bash
# Runs the tests of the gradient against several Megatron-Core versions, each laid over this
# environment (torch and the rest are shared).
#
#   scripts/run_versions.sh                            # all versions, all layouts: minutes each
#   scripts/run_versions.sh 0.13.1 0.19.2              # these
#   TESTS="tests/mcore/test_moe.py" scripts/run_versions.sh 0.19.2
#
# PYTHON: interpreter. VERSIONS_DIR: where the versions are kept. INSTALL_ONLY=1: run nothing. From
# 0.17 on Megatron-Core declares Python >= 3.12; it is built from source and runs on 3.11 too.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
folder=${VERSIONS_DIR:-${TMPDIR:-/tmp}/megatron-versions}
install_only=${INSTALL_ONLY:-}
layouts=(same_gradient layouts context_parallel packing moe accumulate return_styles)
tests=${TESTS:-$(printf 'tests/mcore/test_%s.py ' "${layouts[@]}")}
versions=("$@")
[ $# -gt 0 ] || versions=(0.13.1 0.14.0 0.15.3 0.16.1 0.17.0 0.18.0 0.19.2)

install() {
    local options=(--quiet --no-deps --target "$folder/$1")
    case $1 in
        0.1[3-6].*) ;;
        *) options+=(--ignore-requires-python --no-binary megatron-core) ;;
    esac
    "$python" -m pip install "${options[@]}" "megatron-core==$1"
}

failed=()
for version in "${versions[@]}"; do
    [ -d "$folder/$version/megatron/core" ] || install "$version" || { failed+=("$version"); continue; }
    [ -z "$install_only" ] || continue
    export PYTHONPATH="$folder/$version"
    found=$("$python" -W ignore -c "import megatron.core as m; print(m.__version__)" 2>/dev/null | tail -1)
    echo "== megatron-core $found"
    if [ "${found%%+*}" != "$version" ]; then # Megatron adds the commit of a repository around it
        echo "expected $version: another megatron.core comes first on the path" >&2
        failed+=("$version")
        continue
    fi
    # shellcheck disable=SC2086
    "$python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile $tests || failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
done_word=passed
[ -z "$install_only" ] || done_word=installed
echo "$done_word: ${versions[*]}"
