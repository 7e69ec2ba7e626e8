"""Ways to compute the formula, one file each; `hf_relpos.attention` lists them."""
