"""A linear layer after a normalisation: its matrix products, and those of its gradient.

`product` launches a product and picks its kernel by the tiles that `blocks` chooses:

* `product_warpgroup`: factors of 16 bits, multiplied as stored, on devices with warpgroup products.
* `product_fragment`: other factors of 16 bits, on matrix units, through a ring of stages in shared memory.
* `product_lines`: the same without asynchronous copies, for factors that are multiplied as stored.
* `product_direct`: as `product_lines`, if many tiles share a row: `pack_fragments` first puts the left factor into the
  order of fragments.
* `product_simt`: everything else on a GPU, in float32.
* `product_vector`: CPUs. `pack_vector` packs factors, in a launch of its own if several tasks need the right one.

Kernels share `factors`, the operands as they are loaded and normalised, and `results`, the tile that is stored. Rows
are normalised by the product, from the launch in `statistics`, or before it into a workspace (`plan`).
"""
