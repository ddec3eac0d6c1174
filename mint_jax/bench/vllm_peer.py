"""vLLM on CPUs, in a process and an environment of its own: the peer of decoding with many adapters in one batch.

This file is also the program that runs where vLLM is installed: it then needs nothing but the standard library and vLLM. It reads
batches of requests, a JSON object a line, and answers each with the tokens that it drew. It fetches nothing and reports nothing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def serve(settings: dict[str, Any]) -> None:
    """Answers batches until stdin ends; see ``Peer``."""
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
        how = vllm.SamplingParams(temperature=0.0, max_tokens=batch["tokens"], ignore_eos=True, detokenize=False)
        adapters = [LoRARequest(Path(path).name, number, path) if path else None for number, path in batch["adapters"]]
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        told = engine.generate(prompts, how, lora_request=adapters, use_tqdm=False)
        print(json.dumps([list(one.outputs[0].token_ids) for one in told]), file=answers, flush=True)


class Peer:
    """vLLM over one base in another process.

    Args:
        python: the interpreter that has vLLM.
        settings: ``directory`` of the checkpoint, ``dtype``, ``context`` and ``rows`` at most, ``adapters`` at once, their ``rank``,
            ``compile`` (False: eager), ``cache_gb`` of keys and values.
        log: file for what it prints.

    Raises:
        RuntimeError: it cannot run; with its last words.
    """

    def __init__(self, python: str, settings: dict[str, Any], log: Path):
        self._log = log
        with log.open("w") as out:
            command = [python, "-I", __file__, json.dumps(settings)]  # -I: not our packages, which its environment lacks
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True)
        self.version = self._answer()["version"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(60)
            words = self._log.read_text().strip().splitlines()
            raise RuntimeError(f"vLLM ended with status {self._process.returncode}: {words[-1] if words else 'no word'}; see {self._log}")
        return json.loads(line)

    def generate(self, prompts: Sequence[Sequence[int]], adapters: Sequence[tuple[int, str]], tokens: int) -> list[list[int]]:
        """``tokens`` greedy tokens behind each prompt.

        Args:
            adapters: of each prompt a number above 0 and the PEFT directory; ``(0, "")`` is the bare base.
        """
        assert self._process.stdin is not None
        batch = {"prompts": [list(p) for p in prompts], "adapters": list(adapters), "tokens": tokens}
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
