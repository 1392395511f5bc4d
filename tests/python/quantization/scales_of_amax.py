"""Static scales of inputs, computed by numpy."""

import numpy as np

F32 = np.float32
#: Spec of x -> the scale of an amax, by numerics.md 2.5, 5.9 and 5.11.
SCALES = {
    "fp8_tensor:given": lambda amax: amax / F32(448),
    "fp8_tensor:e5m2:given": lambda amax: amax / F32(57344),
    "nvfp4:global=mul:given": lambda amax: amax / F32(2688),
    "nvfp4:4over6=mse:256:global=mul:given": lambda amax: amax / F32(1536),
    "nvfp4:global=div:given": lambda amax: F32(2688) / amax,
    "nvfp4:given": lambda amax: amax,
}
