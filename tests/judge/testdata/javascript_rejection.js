Promise.reject(new Error("x"));
