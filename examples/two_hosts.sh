#!/usr/bin/env bash
# One model on two hosts, started as vLLM documents it:
#   mp        one `vllm serve` a host with --nnodes, --node-rank and --master-addr, --headless on all but the first
#   ray       `ray start --head` on the first host and `ray start --address` on the other, then `vllm serve` on the first
#   stages    the same, with a pipeline stage on each host (vLLM 0.33)
#   replicas  one `vllm serve` a host, which has a replica of its own and answers requests
# The last two run on the example device.
# Here the hosts are two network namespaces of this machine, joined by one virtual cable (needs root); on real hosts run
# the same commands, each on its own.
#
#     examples/two_hosts.sh [mp|ray|stages|replicas [MODEL]]      PYTHON=path/to/python if it is not .venv/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
way=${1:-mp}
[[ $way =~ ^(mp|ray|stages|replicas)$ ]] || { echo "the way is mp, ray, stages or replicas, not $way" >&2; exit 1; }
model=$(realpath "${2:-examples/models/kjv-2m}")
python=${PYTHON:-.venv/bin/python}
suffix=$$
hosts=("first$suffix" "second$suffix")
addresses=(10.77.0.1 10.77.0.2)
cable=("cable0" "cable1")
log=$(mktemp)
ray_folder=$(mktemp -d)
pids=()

clean_up() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    for host in "${hosts[@]}"; do
        { ip netns pids "$host" | xargs -r kill -9; } 2>/dev/null || true # What Ray left in the background.
        ip netns delete "$host" 2>/dev/null || true
    done
    rmdir "$ray_folder" || true
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

start() { # node, shell script: run there in the background, with shared memory and Ray's folder as a host has its own
    VLLM_HOST_IP=${addresses[$1]} GLOO_SOCKET_IFNAME=${cable[$1]} RAY_TMPDIR=$ray_folder \
        ip netns exec "${hosts[$1]}" bash -euc "
        mount -t tmpfs tmpfs /dev/shm
        mount -t tmpfs tmpfs '$ray_folder'
        $2" >>"$log" 2>&1 &
    pids+=($!)
}

serve="exec $python -m vllm.entrypoints.cli.main serve '$model'
    --max-model-len 256 --max-num-seqs 2 --max-num-batched-tokens 64"
if [[ $way == mp || $way == ray ]]; then
    serve+=" --tensor-parallel-size 2
        --additional-config.neuron_config.num_batched_tokens_buckets '[64]'
        --additional-config.neuron_config.num_seqs_buckets '[2]'
        --additional-config.neuron_config.context_length_buckets '[256]'"
    devices="--resources '{\"neuron_cores\": 1}'" # Ray counts Neuron cores itself; a host without any has to say it.
else
    export VLLM_NEURON_RUNNER=0 PYTHONPATH=$PWD/tests/plugin:$PWD
    serve+=" --enforce-eager --kv-cache-memory-bytes 8388608"
    devices="--num-gpus 1"
fi
serve=${serve//$'\n'/ }
ray="$python -m ray.scripts.scripts start $devices --disable-usage-stats
    --num-cpus 1 --object-store-memory 100000000"
ray=${ray//$'\n'/ }
servers=(0)
case $way in
mp)
    several="--nnodes 2 --master-addr ${addresses[0]}"
    start 0 "$serve $several --node-rank 0"
    start 1 "$serve $several --node-rank 1 --headless"
    ;;
replicas)
    several="--data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-address ${addresses[0]}"
    for node in 0 1; do start "$node" "$serve $several --data-parallel-start-rank $node"; done
    servers=(0 1)
    ;;
ray | stages)
    [[ $way == stages ]] && serve+=" --pipeline-parallel-size 2"
    unset RAY_ADDRESS # It may name another cluster.
    # A cluster's hosts share a token: on real ones, copy what `ray get-auth-token --generate` writes on the first.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')
    start 0 "$ray --head --include-dashboard false --node-ip-address ${addresses[0]}
        $serve --distributed-executor-backend ray"
    start 1 "until $ray --block --address ${addresses[0]}:6379 --node-ip-address ${addresses[1]}; do sleep 1; done"
    ;;
esac

echo "two hosts start; their log: $log"
for node in "${servers[@]}"; do
    url=http://${addresses[$node]}:8000
    until ip netns exec "${hosts[$node]}" curl -sf "$url/health"; do
        for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || { tail -40 "$log"; exit 1; }; done
        sleep 2
    done
    ip netns exec "${hosts[$node]}" curl -s "$url/v1/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"$model\", \"prompt\": \"In the beginning\", \"max_tokens\": 40, \"temperature\": 0}"
    echo
done
echo "what crossed the cable:"
ip -n "${hosts[0]}" -s link show "${cable[0]}"
