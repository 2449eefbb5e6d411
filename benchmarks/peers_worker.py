"""A vLLM process of `peers.py` or `gpu_vllm.py`: reads prompts from lines of stdin, prints times and texts.

    python benchmarks/peers_worker.py '{"model": ..., "engine": {...}, "speculative_config": null}'

It imports nothing that loads compiled code: after that, vLLM 0.32 cannot be started on a CPU.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

MARK = "@@"  # prefix of our lines


def main() -> None:
    """Answer lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of vLLM and its processes goes to the log
    from vllm import LLM

    payload = json.loads(sys.argv[1])
    llm = LLM(payload["model"], **payload["engine"], speculative_config=payload["speculative_config"])
    num_steps, learned = counted_steps(llm), Learned(llm)
    print(f"{MARK}{{}}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        llm.reset_prefix_cache()
        num_steps[:] = [0]
        start_s = time.perf_counter()
        texts = written(llm, request["prompts"], request["max_tokens"], request.get("batch"))
        seconds = time.perf_counter() - start_s
        learned.end_pass(request.get("is_pool", False))
        answer = {"seconds": seconds, "texts": texts, "num_steps": num_steps[0]}
        print(MARK + json.dumps(answer), file=answers, flush=True)


def written(llm, prompts: list[list[int]], max_tokens: int, batch: int | None) -> list[list[int]]:
    """The greedy texts with their end tokens; the engine has at most `batch` requests at once, None: all of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    engine, texts, num_added = llm.llm_engine, {}, 0
    while len(texts) < len(prompts):
        while num_added < len(prompts) and num_added - len(texts) < (batch or len(prompts)):
            engine.add_request(str(num_added), {"prompt_token_ids": prompts[num_added]}, sampling)
            num_added += 1
        for output in engine.step():
            if output.finished:
                texts[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [texts[number] for number in range(len(prompts))]


class Learned:
    """Limits the texts that suffix drafts know to those of the last pass that filled the pool.

    Otherwise a second pass would draft from the texts of the first. Does nothing without suffix drafts.
    """

    def __init__(self, llm) -> None:
        self._cache, self._pool = None, set()
        if (llm.llm_engine.vllm_config.speculative_config or SimpleNamespace(method=None)).method == "suffix":
            executor = llm.llm_engine.engine_core.engine_core.model_executor
            self._cache = executor.driver_worker.worker.model_runner.drafter.suffix_cache

    def end_pass(self, is_pool: bool) -> None:
        """Forget the texts of this pass; if it fills the pool, forget the previous pool instead."""
        if self._cache is None:
            return
        for request in list(self._cache.active_requests):
            self._cache.stop_request(request)
        written = set(self._cache.cached_requests) - self._pool
        for request in self._pool if is_pool else written:
            self._cache.evict_cached_response(request)
        if is_pool:
            self._pool = written


def counted_steps(llm) -> list[int]:
    """A list with one number, which counts from now on the steps of all texts in which a text grows."""
    processor, counted = llm.llm_engine.output_processor, [0]
    process = processor.process_outputs

    def counting(outputs, *arguments, **options):
        counted[0] += sum(bool(output.new_token_ids) for output in outputs)
        return process(outputs, *arguments, **options)

    processor.process_outputs = counting
    return counted


if __name__ == "__main__":
    main()
