setTimeout(() => {}, 60000);
