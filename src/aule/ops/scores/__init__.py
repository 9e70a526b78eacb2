"""Scores between the first product and softmax, for attention and decoding.

- `config`: types, dimensions and options that a kernel is traced for; `parameters`: its buffers and scalars.
- `band`: which keys a row keeps (causal mask, window, lengths), and the modifiers of one batch in order.
- `modifiers`: softcap, additive and boolean masks, ALiBi.
- `pages`: keys and values in pages of a pool; `rotated_operands`: rows of Q and K rotated while they are read.
- `tile_dropout`: dropout of tiles on matrix units.
"""
