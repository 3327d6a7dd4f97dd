"""Which GGUF type each parameter of the model is stored in: the one table for training and conversion."""

# The first part contained in a parameter's name (as the model calls it) decides; other matrices are Q8_0.
QUANTISED_MIX = (
    ("token_embd", "Q4_K"),
    ("norm", "F32"),
    ("ssm_a", "F32"),  # ssm_a_log and ssm_alpha
    ("ssm_beta", "F32"),
    ("ssm_dt", "F32"),
    ("ssm_conv1d", "F32"),
    ("ffn_gate_inp", "F32"),
    ("ffn_gate_up_exps", "Q4_K"),
    ("ffn_down_exps", "Q5_0"),
    ("shexp", "Q6_K"),
    ("attn_output", "Q8_0"),
    ("output", "Q6_K"),
)


def stored_type(parameter_name: str) -> str:
    """The name of the GGUF type of the parameter called `parameter_name` in the model's state dict."""
    return next((kind for part, kind in QUANTISED_MIX if part in parameter_name), "Q8_0")
