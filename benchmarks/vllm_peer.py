"""Decodes with vLLM on CPUs: the program that ``decode_vs_vllm`` runs in vLLM's environment.

It needs the standard library and vLLM alone, reads batches of requests as JSON lines, and writes
the sampled tokens of each. It has no network access and sends no usage reports.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def serve(settings: dict[str, Any]) -> None:
    """Answers batches until stdin ends: ``prompts``, of each the number and PEFT directory of its
    adapter (0 is the bare base), and the number of greedy ``tokens``. ``settings`` has
    ``directory``, ``dtype``, ``context``, ``rows``, ``adapters``, ``rank``, ``compile`` and
    ``cache_gb``.
    """
    os.environ |= QUIET | {"VLLM_CPU_KVCACHE_SPACE": str(settings["cache_gb"])}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever it prints is no answer
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    engine = vllm.LLM(
        model=settings["directory"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=settings["rows"],
        enable_lora=True,
        max_loras=max(1, settings["adapters"]),
        max_lora_rank=settings["rank"],
        skip_tokenizer_init=True,
        enforce_eager=not settings["compile"],
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        how = vllm.SamplingParams(
            temperature=0.0, max_tokens=batch["tokens"], ignore_eos=True, detokenize=False
        )
        adapters = [
            LoRARequest(Path(path).name, number, path) if path else None
            for number, path in batch["adapters"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        outputs = engine.generate(prompts, how, lora_request=adapters, use_tqdm=False)
        print(
            json.dumps([list(one.outputs[0].token_ids) for one in outputs]),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
