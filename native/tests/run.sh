#!/usr/bin/env bash
# Configure, build and run the native unit tests: run.sh BUILD_DIR BUILD_TYPE
set -euo pipefail
cd "$(dirname "$0")/../.."
cmake -G Ninja -S native -B "$1" -DCMAKE_BUILD_TYPE="$2" -DAIOKV_BUILD_TESTS=ON -DAIOKV_WERROR=ON >/dev/null
cmake --build "$1" >/dev/null || cmake --build "$1"
ctest --test-dir "$1" --output-on-failure
