#!/usr/bin/env bash
# One engine on two hosts by vLLM's mp executor, as its documentation starts it: one `vllm serve` a host with --nnodes,
# --node-rank and --master-addr, --headless on all but the first. Here the hosts are two network namespaces of this
# machine, joined by one virtual cable (needs root); on real hosts run the two `vllm serve` lines, one on each.
#
#     examples/two_hosts.sh [MODEL]        PYTHON=path/to/python if it is not .venv/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-examples/models/kjv-2m}
python=${PYTHON:-.venv/bin/python}
suffix=$$
hosts=("first$suffix" "second$suffix")
addresses=(10.77.0.1 10.77.0.2)
cable=("cable0" "cable1")
pids=()

clean_up() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap clean_up EXIT

for host in "${hosts[@]}"; do
    ip netns add "$host"
    ip -n "$host" link set lo up
done
ip link add "${cable[0]}" netns "${hosts[0]}" type veth peer name "${cable[1]}" netns "${hosts[1]}"
for node in 0 1; do
    ip -n "${hosts[$node]}" address add "${addresses[$node]}/24" dev "${cable[$node]}"
    ip -n "${hosts[$node]}" link set "${cable[$node]}" up
done

serve() { # node, further options
    local node=$1
    shift
    VLLM_HOST_IP=${addresses[$node]} GLOO_SOCKET_IFNAME=${cable[$node]} \
        exec ip netns exec "${hosts[$node]}" "$python" -m vllm.entrypoints.cli.main serve "$model" \
        --tensor-parallel-size 2 --nnodes 2 --node-rank "$node" --master-addr "${addresses[0]}" \
        --max-model-len 256 --max-num-seqs 2 --max-num-batched-tokens 64 \
        --additional-config '{"neuron_config": {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [2],
                              "context_length_buckets": [256]}}' "$@"
}

log=$(mktemp)
serve 1 --headless >"$log" 2>&1 &
pids+=($!)
serve 0 --port 8000 >>"$log" 2>&1 &
pids+=($!)
echo "two hosts start; their log: $log"
on_first() { ip netns exec "${hosts[0]}" "$@"; }
until on_first curl -sf "http://${addresses[0]}:8000/health"; do
    for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || { tail -40 "$log"; exit 1; }; done
    sleep 2
done
on_first curl -s "http://${addresses[0]}:8000/v1/completions" -H 'Content-Type: application/json' \
    -d "{\"model\": \"$model\", \"prompt\": \"In the beginning\", \"max_tokens\": 40, \"temperature\": 0}"
echo
echo "what crossed the cable:"
ip -n "${hosts[0]}" -s link show "${cable[0]}"
