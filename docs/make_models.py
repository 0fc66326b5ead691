"""Write the table of docs/model.md that says which models load, by the names that people know.

Usage: python docs/make_models.py (rewrites docs/model.md between the markers; tests/test_readme.py
compares, and asks transformers for all types of models that it has)
"""

from __future__ import annotations

from pathlib import Path

from made_parts import with_made_parts

from monograph.errors import InputRefused
from monograph.model.families import FAMILIES, find_family
from monograph.model.hub import text_model_type

PAGE = Path(__file__).resolve().parent / "model.md"
BEGIN = "<!-- made by docs/make_models.py -->"
# The published models of a model_type, which is what their config.json says.
NAMES = {
    "llama": "Llama 2, 3, 3.1, 3.2 1B and 3B, 3.3; TinyLlama; SmolLM 1 and 2; R1-Distill-Llama",
    "mistral": "Mistral 7B, Mistral Nemo",
    "ministral3": "text models that were saved alone, as exports are",
    "mistral3": "Ministral 3: 3B, 8B and 14B; Mistral Small 3.1 and 3.2",
    "qwen2": "Qwen 1.5, 2 and 2.5, also Coder and Math; R1-Distill-Qwen",
    "qwen3": "Qwen 3 from 0.6B to 32B",
    "olmo2": "OLMo 2",
    "smollm3": "SmolLM3 3B",
    "olmo3": "Olmo 3",
    "gemma3_text": "Gemma 3 270M and 1B",
    "gemma3": "Gemma 3 4B, 12B and 27B",
    "gemma4_text": "text models that were saved alone, as exports are",
    "gemma4": "Gemma 4 of any size, with experts or without",
    "phi3": "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini",
    "granite": "Granite 3.0 to 3.3, 2B and 8B",
    "qwen3_5_text": "text models that were saved alone, as exports are",
    "qwen3_5": "Qwen 3.5 without experts, such as 0.8B and 27B",
    "qwen3_next": "Qwen3-Next 80B-A3B",
    "qwen3_5_moe_text": "text models that were saved alone, as exports are",
    "qwen3_5_moe": "Qwen 3.5 with experts, such as 35B-A3B",
    "qwen3_moe": "Qwen 3 30B-A3B and 235B-A22B",
    "olmoe": "OLMoE 1B-7B",
    "gpt_oss": "gpt-oss 20B and 120B",
    "granitemoehybrid": "Granite 4.0: Micro, H-Micro, H-Tiny and H-Small",
    "glm": "GLM-4 9B as `glm-4-9b-chat-hf`, GLM-Edge 1.5B and 4B",
    "glm4": "GLM-4-0414, GLM-Z1 and Rumination: 9B and 32B",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "exaone4": "EXAONE 4.0: 1.2B and 32B",
    "helium": "Helium 1: 2B",
    "gemma": "Gemma 1 and 1.1, CodeGemma: 2B and 7B",
    "bamba": "Bamba 9B, versions 1 and 2",
    "lfm2": "LFM2 and LFM2.5 without experts, such as 350M, 700M, 1.2B and 2.6B",
    "nemotron_h": "Nemotron-H, such as 8B and 56B; Nemotron Nano 9B and 12B v2",
}


def loads(model_type: str) -> bool:
    """Return whether models of a model_type load: whole, or their text half."""
    try:
        find_family(text_model_type(model_type))
    except InputRefused:
        return False
    return True


def table() -> str:
    """Return the table."""
    lines = ["| models | model_type | what is loaded |", "|---|---|---|"]
    for model_type, names in NAMES.items():
        what = "all" if model_type in FAMILIES else "the text model"
        lines.append(f"| {names} | `{model_type}` | {what} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page's text with a new table."""
    return with_made_parts(text, BEGIN, [table()])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
