#!/bin/bash
# What an NVIDIA GPU says of this commit, as one text: tests of the kernels, then of the operators and layers, then the
# questions that wait for hardware. For a machine that is at hand for minutes: everything is built before.
#
#     ./dev test --torch 2.11.0 --quick tests/quire_torch/test_refusals.py                here: builds, with tests
#     tools/gpu_check.sh pack build/torch-2.11.0 > build/gpu.tar.gz                       here
#     QUIRE_COMMIT=HASH tools/gpu_check.sh build/gpu.tar.gz > docs/gpu/CARD-DATE.txt      there
#     ./dev build --torch 2.13.0                                                          here: back to this PyTorch
#
# 2.11.0 stands for that machine's minor version of PyTorch: a build against PyTorch for CPUs serves its builds with CUDA
# too. Python may be another one, from 3.11 on; its packages numpy, pytest, pytest-xdist, hypothesis, safetensors and tqdm
# are needed. HASH is the commit, where git is not there to say it. On a machine that builds for itself the folder of the
# build takes the place of the archive. Without a driver every part fails for want of one, but "what is installed".
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:?pack, an archive or the folder of a build}" = pack ]; then
  exec tar -C "${2:?the folder of the build}" --dereference -cz lib golden tests/cuda/test_cuda
fi
if [ -f "$1" ]; then
  build=$(mktemp -d)
  tar -C "$build" -xzf "$1" || exit 1
else
  build=$(cd "$1" && pwd) || exit 1
fi
cd "$root" || exit 1
failed=0
logs=$(mktemp -d)
titles=()

# begin TITLE SECONDS COMMAND...: starts it beside the others that began; SIGINT lets pytest say what has failed so far.
begin() {
  local title=$1 seconds=$2 log=$logs/${#titles[@]}
  shift 2
  titles+=("$title")
  {
    local start=$SECONDS
    timeout --signal=INT --kill-after=20 "$seconds" env --default-signal=INT "$@" >"$log" 2>&1
    echo "$? $((SECONDS - start))" >"$log.status"
  } &
}

# finish: waits for all that began, and writes their outputs in order.
finish() {
  wait
  local i status took
  for i in "${!titles[@]}"; do
    read -r status took <"$logs/$i.status"
    [ "$status" -eq 0 ] || failed=$((failed + 1))
    printf '\n== %s\n' "${titles[$i]}"
    sed -E "s#$root/##g; s#/[^ \"(]*/(site-packages/|bin/python3)#\1#g" "$logs/$i"  # paths say nothing elsewhere
    printf '== %s: %s in %d s\n' "${titles[$i]}" "$([ "$status" -eq 0 ] && echo passed || echo "FAILED, status $status")" "$took"
  done
  titles=()
}

part() {
  begin "$@"
  finish
}

printf 'commit %s\ndate %s\n' "${QUIRE_COMMIT:-$(git rev-parse HEAD 2>/dev/null)}" "$(date -u +%F)"
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
python3 -c 'import sys, torch; print("PyTorch", torch.__version__, "Python", sys.version.split()[0])'

ln -sfn "$build/lib" python/quire/lib
# PyTorch's cuBLASLt, also for programs without PyTorch.
cublaslt=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] / "nvidia/cu13/lib")')
# Cases that want a GPU fail where PyTorch finds none.
export QUIRE_REQUIRE_CUDA=1
export PYTHONPATH=$root/python QUIRE_GOLDEN_DIR=$build/golden LD_LIBRARY_PATH=$build/lib:$cublaslt:${LD_LIBRARY_PATH:-}
of_the_emulator='*Emulator*:*Faults*:*Features*:*Functions*:*Gate*:*Mutations*:*Orders*:*/Tensor*'
kernels=("$build/tests/cuda/test_cuda" --gtest_brief=1 "--gtest_filter=-$of_the_emulator")
# A kernel that reads beyond its memory breaks the context of its process: several of them share the tests.
# shards COUNT COMMAND...: the command that runs them.
shards() {
  printf '%s\n' bash -c 'seq 0 $(($0 - 1)) | xargs -P "$0" -I {} env GTEST_TOTAL_SHARDS=$0 GTEST_SHARD_INDEX={} "$@"' "$@"
}
references=QUIRE_KERNEL=gemm:reference
tests=(python3 -m pytest -q --tb=short --device cuda)
quick=("${tests[@]}" -n 5 --quick --maxfail=150 tests/python tests/quire_torch)
mapfile -t of_kernels < <(shards 4 QUIRE_CUDA_TESTS=gpu "${kernels[@]}")

# Nothing here is timed, so all of it runs at once.
export OMP_NUM_THREADS=2
begin "kernels against the CPU" 130 "${of_kernels[@]}"
begin "what is installed" 60 python3 -m quire.info
begin "golden vectors of quantizers" 90 python3 -m quire.info --check --device cuda
# Many tests compare with the CPU or with other sizes of a batch, bit for bit: the reference has the CPU's reference's.
begin "golden vectors, operators and layers, products by the reference" 130 "$references" "${quick[@]}"
begin "the same, products by the rows that come first" 130 "${quick[@]}"
begin "features in every way to run them" 130 "${tests[@]}" -n 5 --maxfail=60 tests/python/test_every_way.py
begin "ranks that share the GPU, and NCCL" 130 "$references" "${tests[@]}" tests/python/distributed/test_ranks_on_a_device.py
for question in captured compiled; do
  begin "question: $question.py" 130 python3 tools/gpu_questions/$question.py
done
finish
unset OMP_NUM_THREADS

for question in tools/gpu_questions/*; do
  case $question in
    */captured.py | */compiled.py) ;;
    *.py) part "question: $(basename "$question")" 60 python3 "$question" ;;
    *.sh) part "question: $(basename "$question")" 60 bash "$question" "$build" ;;
  esac
done
if command -v compute-sanitizer >/dev/null; then
  for check in memcheck racecheck; do
    mapfile -t of_kernels < <(shards 6 QUIRE_CUDA_TESTS=gpu QUIRE_CUDA_CASES=few compute-sanitizer --tool $check \
      --error-exitcode 9 "${kernels[@]}")
    begin "compute-sanitizer $check" 60 "${of_kernels[@]}"
  done
  finish
fi
printf '\n%d parts failed\n' "$failed"
exit $((failed > 0))
