// Small pictures for the gallery, so that five hundred works need not be decoded to be listed.

const EDGE = 360;

/** A small picture of a picture, or of a video's first frame; null where neither can be read. */
export async function thumbnail(blob) {
  try {
    return blob.type.startsWith("video/") ? await ofVideo(blob) : await ofImage(blob);
  } catch {
    return null;
  }
}

async function ofImage(blob) {
  const bitmap = await createImageBitmap(blob);
  if (Math.max(bitmap.width, bitmap.height) <= EDGE) return blob;
  return drawn(bitmap, bitmap.width, bitmap.height);
}

async function ofVideo(blob) {
  const video = document.createElement("video");
  video.muted = true;
  video.src = URL.createObjectURL(blob);
  try {
    await new Promise((resolve, reject) => {
      video.onloadeddata = resolve;
      video.onerror = () => reject(new Error("no video"));
      setTimeout(() => reject(new Error("too slow")), 5000);
    });
    return await drawn(video, video.videoWidth, video.videoHeight);
  } finally {
    URL.revokeObjectURL(video.src);
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
