// Small pictures for the gallery, so that five hundred works need not be decoded to be listed.

const EDGE = 360;

/** A small picture of a picture; null where it cannot be read. */
export async function thumbnail(blob) {
  try {
    const bitmap = await createImageBitmap(blob);
    if (Math.max(bitmap.width, bitmap.height) <= EDGE) return blob;
    return await drawn(bitmap, bitmap.width, bitmap.height);
  } catch {
    return null;
  }
}

function drawn(source, width, height) {
  const scale = Math.min(1, EDGE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.getContext("2d").drawImage(source, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/webp", 0.85));
}
