#!/usr/bin/env bash
# Installs the project with its test extra (once; later runs reuse it) and runs its tests on up to 8 cores.
#
#   bash tests/run.sh                    the core of the suite and samples of the rest: 10 minutes on two idle cores
#   bash tests/run.sh --changed [REF]    every test that depends on a file changed since REF (origin/main)
#   bash tests/run.sh --all              everything; with --cases 401 also what is marked campaign
#   bash tests/run.sh -k parity          further arguments go to pytest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
extra=test-all
case "${1:-}" in
    --all) shift ;;
    --changed)
        shift
        reference=origin/main
        case "${1:--}" in -*) ;; *) reference="$1" && shift ;; esac
        set -- --changed "$reference" "$@"
        ;;
    *)
        extra=test
        set -- --core "$@"
        ;;
esac
prepare_environment "$extra"
if [ -z "${CI:-}" ]; then  # what shrank stays small
    "$PYTHON" -m tests.helpers.architecture.budget
    "$PYTHON" -m tests.helpers.architecture.wording >/dev/null
fi
workers="$("$PYTHON" -c 'import os; print(min(8, os.cpu_count() or 1))')"

# A failed test is tried again alone, in case the machine stood still. One that then passes is reported and does not fail
# the run, but it is a defect of the test or of what it tests.
MOST_SECOND_TRIES=5
failures=.pytest_cache/v/cache/lastfailed
rm -f "$failures"
status=0
"$PYTHON" -m pytest --numprocesses "$workers" --dist loadgroup "$@" || status=$?
[ "$status" -ne 5 ] || [ "${1:-}" != --changed ] || exit 0  # the change affects no test
if [ "$status" -ne 1 ] || [ ! -s "$failures" ] || [ "$(grep -c ': true' "$failures")" -gt "$MOST_SECOND_TRIES" ]; then
    exit "$status"
fi
sed -i.bak 's/@[^"@]*": true/": true/' "$failures"  # pytest-xdist names the group of a test after an @
say "failed once, tried again alone:"
sed -n 's/^ *"\(.*\)": true,\{0,1\}$/  \1/p' "$failures" >&2
"$PYTHON" -m pytest --numprocesses 0 --last-failed --last-failed-no-failures none "$@"
say "passed on the second try: each of these tests is unsteady and has to be mended."
