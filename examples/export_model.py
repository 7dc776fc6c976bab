"""A group's model in a folder of its own, loaded with torch alone."""

from pathlib import Path
from shutil import rmtree

import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import emdcfl
from emdcfl.report import write_report
from emdcfl.report.export import export

run = Path("export_model")
rmtree(run, ignore_errors=True)
result = emdcfl.fit("rotated-digits", rounds=2, out=run)
write_report(run)
folders = export(run)
print([str(folder) for folder in folders])

images = np.uint8(load_digits().images[:8] * 255 / 16)[:, None]
model = torch.export.load(folders[0] / "model.pt2").module()  # from here on, torch alone
probabilities = model(torch.from_numpy(images)).detach()
assert torch.allclose(probabilities, result.predict_proba("rot0-1", images), atol=1e-5)

figure, axes = plt.subplots(1, 8, figsize=(10, 2))
for axis, image, p in zip(axes, images, probabilities, strict=True):
    axis.imshow(image[0], cmap="gray")
    axis.set_title(f"{int(p.argmax())} ({float(p.max()):.0%})", fontsize=9)
    axis.axis("off")
figure.suptitle("Digits, and what the model of group 0 says")
figure.savefig("export_model.png", dpi=100)
print("picture: export_model.png")
