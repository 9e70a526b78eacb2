import torch, json, time
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
import triton
torch.backends.cuda.matmul.allow_tf32=False
torch.backends.cudnn.allow_tf32=False
for d in (64,128):
  for S in (512,2048,8192):
    for causal in (False,True):
      H=2048//d; B=16384//S
      q,k,v=[torch.randn(B,H,S,d,device='cuda') for _ in range(3)]
      r={}
      for be in (SDPBackend.EFFICIENT_ATTENTION,):
        with sdpa_kernel(be):
          ms=triton.testing.do_bench(lambda: F.scaled_dot_product_attention(q,k,v,is_causal=causal),warmup=50,rep=300,return_mode='median')
      fl=4*B*H*S*S*d/(2 if causal else 1)
      print(f"d{d} S{S} causal={causal} EFFICIENT fp32 {ms:.3f} ms {fl/ms/1e9:.1f} TFLOPS",flush=True)
try:
  import wgpu
  for a in wgpu.gpu.enumerate_adapters_sync():
    print(a.info); print(sorted(a.features)); print(dict(a.limits))
except Exception as e: print('wgpu',e)
try:
  import pyopencl as cl
  for p in cl.get_platforms():
    for dv in p.get_devices():
      print(dv.name,dv.version,dv.opencl_c_version,dv.local_mem_size,dv.max_work_group_size,dv.extensions, dv.max_mem_alloc_size)
except Exception as e: print('cl',e)
