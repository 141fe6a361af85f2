#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, tests, sanitizer, bench. Results go to $1.
# Needs nvcc, CuPy and the test dependencies of this machine's python3.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:-bench/results}")
mkdir -p "$out"
parts=" ${2:-build tests sanitizer bench} "
python=${PYTHON:-python3}
status=0

if [[ $parts == *" build "* ]]; then
    $python -m pip install -q --no-deps --no-build-isolation -e . || exit 1
fi
if [[ $parts == *" tests "* ]]; then
    $python -m pytest -q -m gpu tests/gpu -p no:cacheprovider --junitxml="$out/gpu-tests.xml" || status=1
    $python -m bench.gpu_tests_json "$out/gpu-tests.xml" "$out" || status=1
fi
if [[ $parts == *" sanitizer "* ]]; then
    for tool in memcheck racecheck; do
        timeout 250 compute-sanitizer --tool "$tool" --target-processes all \
            --error-exitcode 9 $python -m pytest -q -x -m gpu -p no:cacheprovider \
            tests/gpu/test_bytes.py \
            >"$out/sanitizer-$tool.log" 2>&1
        code=$?
        echo "compute-sanitizer $tool: exit $code, $(grep -cE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$out/sanitizer-$tool.log") clean"
        [[ $code == 0 ]] || status=1
    done
fi
if [[ $parts == *" bench "* ]]; then
    $python -m bench.gpu --out "$out/gpu.json" || status=1
fi
exit $status
