#!/bin/sh
# nvcc.sh OUTPUT COMMAND...: compiles OUTPUT by nvcc with `-Xptxas -v`; what ptxas tells of each kernel stays in
# OUTPUT.ptxas, which tests read. Fails, and leaves no OUTPUT, where ptxas keeps registers in memory, or warns: it
# repairs what it cannot do (C75xx) and says no more than that.
output=$1
shift
if ! "$@" 2> "$output.ptxas"; then
  cat "$output.ptxas" >&2
  exit 1
fi
if grep -E -B 2 '[1-9][0-9]* bytes spill|C75[0-9][0-9]|[Ww]arning' "$output.ptxas" >&2; then
  echo "$output: spilled registers and warnings of ptxas are errors" >&2
  rm -f "$output"
  exit 1
fi
