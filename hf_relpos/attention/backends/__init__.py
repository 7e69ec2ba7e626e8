"""Ways to compute the formula, one in each file. `hf_relpos.attention` lists them."""
