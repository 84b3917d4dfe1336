"""Deliberate faults in KV connectors, and in cache blocks on the host."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "blocks are saved before the step has written them",
        "vllm_compat/types/kv_connector.py",
        "        connector.start_load_kv(context)\n",
        "        type(connector).wait_for_save(connector)\n"
        '        vars(connector)["wait_for_save"] = int\n'
        "        connector.start_load_kv(context)\n",
        "test_loaded_blocks and all",
    ),
    Mutation(
        "a step reads blocks before they are loaded",
        "vllm_compat/types/kv_connector.py",
        "        connector.start_load_kv(context)\n",
        "        def load_and_save() -> None:\n"
        "            connector.start_load_kv(context)\n"
        "            type(connector).wait_for_save(connector)\n"
        '        vars(connector)["wait_for_save"] = load_and_save\n',
        "test_loaded_blocks and all",
    ),
    Mutation(
        "a load that fails is not reported",
        "vllm_compat/types/kv_connector.py",
        "self._failed | connector.get_block_ids_with_load_errors(), set()",
        "set(), set()",
        "test_loaded_blocks and fail",
    ),
    Mutation(
        "a request does not go back to the block that was not loaded",
        "runner/state_updates.py",
        "        is_behind = num_computed < requests.num_computed[rows]",
        "        is_behind = num_computed < -requests.num_computed[rows]",
        "test_loaded_blocks and fail",
    ),
    Mutation(
        "a store is acknowledged before its blocks are copied",
        "caches/host_offload.py",
        "        host[places] = cache[ids.to(cache.device)].cpu().view(torch.uint8)\n",
        '        late, self._late = vars(self).get("_late"), (host, places, cache, ids)\n'
        "        if late:\n"
        "            late[0][late[1]] = late[2][late[3]].view(torch.uint8)\n",
        "test_kv_connectors and host",
    ),
]
