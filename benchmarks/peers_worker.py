"""One vLLM of `peers.py`, in a process of its own: prompts come in on a line, times and texts go out on one.

    python benchmarks/peers_worker.py '{"model": ..., "engine": {...}, "speculative_config": null}'

Imports nothing that loads compiled code: vLLM 0.32 on a CPU cannot be started after it.
"""

import json
import sys
import time

MARK = "@@"  # before our lines: vLLM logs to the same place


def main() -> None:
    """Answer until nobody asks."""
    from vllm import LLM, SamplingParams

    told = json.loads(sys.argv[1])
    llm = LLM(told["model"], **told["engine"], speculative_config=told["speculative_config"])
    num_steps = counted_steps(llm)
    print(f"{MARK}{{}}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        num_steps[:] = [0]
        start_s = time.perf_counter()
        found = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        texts = [list(one.outputs[0].token_ids) for one in found]
        answer = {"seconds": seconds, "texts": texts, "num_steps": num_steps[0]}
        print(MARK + json.dumps(answer), flush=True)


def counted_steps(llm) -> list[int]:
    """A list of one number: the steps of all texts from here on, of each those that it grows in."""
    scheduler, counted = llm.llm_engine.engine_core.engine_core.scheduler, [0]
    update = scheduler.update_from_output

    def counting(scheduled, output):
        counted[0] += sum(map(bool, output.sampled_token_ids))
        return update(scheduled, output)

    scheduler.update_from_output = counting
    return counted


if __name__ == "__main__":
    main()
