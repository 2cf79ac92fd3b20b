"""Generation with a DeepSeek-V3.2 of transformers: chunked prefill of two prompts, decode, and reuse of a prefix."""

import time

import torch
from hf_reference import small_model

from sparse_cp_ops.integrations.transformers import SparseCpModel

STEPS = 12


def main() -> None:
    model = small_model("deepseek_v32")  # random weights; any DeepseekV32ForCausalLM works
    sparse = SparseCpModel(model, num_pages=64, max_positions=4096)
    story = list(b"Once upon a time there was an attention layer that read every key. " * 8)
    prompts = [story, story[:300] + list(b"What did it read?")]

    requests, logits = sparse.prefill(prompts, chunk_tokens=256)
    generated: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    for _ in range(STEPS):
        tokens = logits.argmax(dim=-1).tolist()
        for text, token in zip(generated, tokens, strict=True):
            text.append(token)
        logits = sparse.decode(requests, tokens)
    seconds = time.perf_counter() - start
    for prompt, text in zip(prompts, generated, strict=True):
        print(f"{len(prompt)} tokens in, {len(text)} out: {bytes(text)!r}")
    print(f"{STEPS} decode steps of {len(prompts)} requests in {seconds:.2f} s")

    # transformers' own model on the first prompt and its answer: no FP8, and so a few other keys are picked.
    with torch.no_grad():
        exact = model(torch.tensor([prompts[0] + generated[0]])).logits[0, -1]
    print(f"relative difference of the last logits to transformers: {(logits[0] - exact).norm() / exact.norm():.2f}")

    sparse.release(requests)
    [again], _ = sparse.prefill([story + generated[0]])
    print(f"the first prompt and its answer once more: {again.prefix_hit} of {len(again.tokens)} tokens were cached")


if __name__ == "__main__":
    main()
