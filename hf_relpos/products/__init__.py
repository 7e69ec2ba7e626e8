"""Matrix products on the CPU, of linear layers and of attention: by which library, in which dtype."""
